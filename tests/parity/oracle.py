"""The same optimizer step in plain torch: transformers' models, one sequence at a time."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    ENTROPY_COEF,
    KL_COEF,
    TEMPERATURE,
    VALUE_CLIP,
    VALUE_COEF,
    VOCAB,
    make_batch,
    make_vectors,
    relative,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.megatron.cpu.shim import replaced
from rlcore.hf_config.language import as_trained
from tests.language_models import VISION, draw

TIGHT = 1e-5  # relative, over each whole tensor
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
    # transformers gives the row of a pad token no gradient.
    "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Head sizes, groups and norms such that what is mistaken for something else comes out otherwise.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-3, "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
        "original_max_position_embeddings": 16, "beta_fast": 4.0,
        "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.3},
}  # fmt: skip
LATENT_PLAIN: dict[str, Any] = {
    **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
    "first_k_dense_replace": 0,
    "rope_interleave": False, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
# Sequences have up to five times the original length.
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 0.5,
    "high_freq_factor": 3.0, "original_max_position_embeddings": 8,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 8,
    "beta_fast": 2.0, "beta_slow": 0.1, "truncate": False, "attention_factor": 1.2,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "factor": 5.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.5, 5.0],
}  # fmt: skip
# The norm of a state's output multiplies small differences by up to 1 / sqrt(rms_norm_eps).
DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "rms_norm_eps": 1e-2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "num_hidden_layers": None, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 10,
    "n_groups": 4, "ssm_state_size": 6, "layer_norm_epsilon": 0.1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
# A model's place seeds its weights: new ones go to the end.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_other": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_three": ("Qwen3Config", {"head_dim": 16, "num_hidden_layers": 3}),
    "qwen3_six": ("Qwen3Config", {"head_dim": 16, "num_hidden_layers": 6}),
    "qwen3_tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_other": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_tied": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True,
        "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1]}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
        "rope_parameters": LONGROPE}),
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "ministral3": ("Ministral3Config", {
        "head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 0, 1], "rope_parameters": {
        "rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v3_other": ("DeepseekV3Config", LATENT),
    "deepseek_v3_plain": ("DeepseekV3Config", LATENT_PLAIN),
    "deepseek_v32": ("DeepseekV32Config", {
        **LATENT, "index_n_heads": 2, "index_head_dim": 16}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {
        **LATENT, "n_group": 1, "topk_group": 1, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk_pattern": "FSSF", "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0}}),
    "gpt_oss": ("GptOssConfig", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 24,
        "sliding_window": 4, "swiglu_limit": 1.0, "rms_norm_eps": 1e-3, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16}}),
    "gemma3_text": ("Gemma3TextConfig", {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4,
        "rms_norm_eps": 1e-3, "pad_token_id": None, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}),
    "minimax_m2": ("MiniMaxM2Config", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
            "partial_rotary_factor": 0.5}}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {
        **LATENT, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    "glm4_moe": ("Glm4MoeConfig", {
        "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "n_shared_experts": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.7, "first_k_dense_replace": 1,
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "qwen3_next": ("Qwen3NextConfig", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1]}),
    "qwen3_5_tied": ("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": True}),
    "qwen3_5_mqa": ("Qwen3_5TextConfig", {**DELTA, "num_key_value_heads": 1}),
    # The language model of a folder with a vision tower.
    "qwen3_5_moe": ("Qwen3_5MoeConfig", {
        **EXPERTS, **DELTA, "shared_expert_intermediate_size": 40, "vision_config": VISION}),
    # One KV head, which tensor-parallel ranks divide.
    **{
        f"{name}_mqa{'_tied' * tied}": (f"{kind}Config", {
            **keys, "num_key_value_heads": 1, "tie_word_embeddings": tied})
        for name, kind, keys in (
            ("qwen2", "Qwen2", {}),
            ("qwen3", "Qwen3", {"head_dim": 16}),
            ("qwen3_moe", "Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
        )
        for tied in (False, True)
    },
    "nemotron_h": ("NemotronHConfig", {**MAMBA, "layers_block_type": [
        "linear_attention", "moe", "full_attention", "linear_attention"]}),
    "nemotron_h_dense": ("NemotronHConfig", {**MAMBA, "layers_block_type": [
        "linear_attention", "mlp", "full_attention", "mlp"]}),
    "gemma4_text": ("Gemma4TextConfig", {
        "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 4,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 4,
        "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-3, "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision", "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 500.0,
                "partial_rotary_factor": 0.25}},
        "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "olmo3": ("Olmo3Config", {
        "sliding_window": 4, "rms_norm_eps": 1e-3, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {**YARN, "truncate": True}}}),
}  # fmt: skip


# Their norms scale by 1 + weight.
ZERO_CENTRED = ("gemma3_text",)


def write_models(folder: Path, *, only: Collection[str] = MODELS) -> None:
    """Random weights large enough that every parameter has a clear gradient."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for seed, (name, (config, keys)) in enumerate(MODELS.items()):
        if name not in only:
            continue
        torch.manual_seed(seed)
        model = draw(config, {**SIZES, **keys})
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                # Beside gated delta rules norms scale by 1 + weight, as do Gemma's.
                centred = name in ZERO_CENTRED or "linear_num_key_heads" in keys
                centred = centred and "linear_attn.norm" not in key
                plain = "norm" in key and not centred
                parameter.normal_(1.0 if plain else 0.0, 0.5 if "conv1d" in key else 0.15)
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.05)  # small: every expert is chosen
                elif key.endswith("layer_scalar"):
                    buffer.normal_(1.0, 0.15)
        model.save_pretrained(folder / name)
        if "vision_config" in keys:
            _publish(folder / name / "model.safetensors")


def _publish(file: Path) -> None:
    """Lay a layer's experts into one tensor, and add what predicts further tokens.

    Published folders are so; transformers writes an expert at a time.
    """
    tensors = load_file(file)
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in sorted(layers):
        gate, up, down = (
            torch.stack(
                [
                    tensors.pop(f"{layer}.experts.{expert}.{kind}_proj.weight")
                    for expert in range(EXPERTS["num_experts"])
                ]
            )
            for kind in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{layer}.experts.down_proj"] = down
    tensors["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(tensors, file, metadata={"format": "pt"})


def _per_sequence(model: Any, head: Any) -> list[Tensor]:
    """Run `head(hidden, tokens, predicted positions)` on each sequence with trainable tokens."""
    batch = make_batch()
    out = []
    for start, end in zip(batch.cu_tokens.tolist(), batch.cu_tokens.tolist()[1:]):
        trainable = batch.loss_mask[start:end].nonzero()[:, 0]
        if len(trainable):
            tokens = batch.tokens[start:end].long()
            hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
            out.append(head(hidden[trainable - 1], tokens[trainable]))
    return out


# A few numbers, each the sum over all tokens of terms that cancel.
DECAYS = (".A_log", ".dt_bias")


def far(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = TIGHT
) -> dict[str, float]:
    """The tensors that are further off than allowed, or are no numbers."""
    return {
        name: d
        for name, want in expected.items()
        if not (d := relative(got[name], want)) <= bound * (3 if name.endswith(DECAYS) else 1)
    }


def check_gradients(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = TIGHT
) -> None:
    """All gradients are within the bound; what a folder has as a buffer has none on a rank."""
    buffers = ("e_score_correction_bias", "layer_scalar")
    biases = {name for name in got if name.endswith(buffers)}
    assert not any(got[name].count_nonzero() for name in biases), "no step may move it"
    assert got.keys() - biases == expected.keys() - biases
    others = {name: want for name, want in expected.items() if name not in biases}
    assert not (found := far(got, others, bound)), f"distances of gradients above {bound}: {found}"


def check_scores(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = TIGHT
) -> None:
    """Log-probs and entropies, or values, are within the bound."""
    compared = got.keys() & {"logprobs", "entropy", "values"}
    assert compared
    for key in compared:
        torch.testing.assert_close(got[key].double(), expected[key].double(), atol=bound, rtol=0)


def check_step(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """A case's scores, gradients and metrics are those of another case."""
    for kind in expected.keys() & got.keys() & {"scores", "values"}:
        check_scores(got[kind], expected[kind])
    for model, gradients in got["gradients"].items():
        check_gradients(gradients, expected["gradients"][model])
    # packs differ in what they share
    for metric in got["metrics"].keys() - {"perf/shared_tokens"}:
        assert got["metrics"][metric] == pytest.approx(
            expected["metrics"][metric], rel=1e-4, abs=1e-6
        ), metric


def policy_step(folder: Path, *, on_policy: bool = False) -> dict[str, Any]:
    """Log-probs [M], entropy [M] and all gradients of PPO-clip with KL and entropy terms."""
    model = _load(folder)
    logprobs, entropy = _policy_backward(model, on_policy=on_policy)
    return {"logprobs": logprobs, "entropy": entropy, "gradients": _gradients(model)}


def logprobs_around(folder: Path, moved: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs [M] of a model, and of the model whose weights have `moved`."""
    model = _load(folder)

    def head(hidden: Tensor, targets: Tensor) -> Tensor:
        log_p = (model.lm_head(hidden) / TEMPERATURE).log_softmax(-1)
        return log_p.gather(1, targets[:, None])[:, 0]

    with torch.no_grad():
        before = torch.cat(_per_sequence(model, head))
        for name, parameter in model.named_parameters():
            for on_disk, part in _as_on_disk(model, name, parameter):
                part += moved[on_disk].double()
        return before, torch.cat(_per_sequence(model, head))


def rate(step: int) -> float:
    """TRAINED's learning rate: two steps of warm-up, then half a cosine until step 6."""
    if step < 2:
        return 1e-3 * (step + 1) / 2
    return 1e-4 + 0.5 * (1e-3 - 1e-4) * (1 + math.cos(math.pi * (step - 2) / 4))


def trained(folder: Path, *, steps: int) -> dict[str, Tensor]:
    """The change of every weight by `steps` of torch's AdamW under TRAINED."""
    model = _load(folder)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        _policy_backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return {
        on_disk: part for name, p in moved.items() for on_disk, part in _as_on_disk(model, name, p)
    }


def _load(folder: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    as_trained(model)
    for module in model.modules():
        if hasattr(module, "A_log"):
            module.forward = partial(_in_double, module.forward)
    if cap := getattr(model.config, "final_logit_softcapping", None):
        model.lm_head.register_forward_hook(lambda _, __, logits: cap * torch.tanh(logits / cap))
    # transformers reads the language model of a larger one under its own names.
    inside = "text_config" in json.loads((folder / "config.json").read_text())
    model.prefix_on_disk = "model.language_model." if inside else "model."
    if model.config.model_type == "nemotron_h":
        model.prefix_on_disk = "backbone."
    return model


def _in_double(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a layer with our delta rule: transformers' computes in single precision in any model.

    Other tests of the process get transformers'.
    """
    code = sys.modules[type(forward.__self__).__module__]  # type: ignore[attr-defined]
    name, own = "torch_chunk_gated_delta_rule", _delta_rule
    if hasattr(code, "mamba2_chunk_scan"):
        name, own = "mamba2_chunk_scan", _state_space
    with replaced(code, name, own):
        return forward(*args, **options)


def _state_space(
    value: Tensor, step: Tensor, decay: Tensor, key: Tensor, query: Tensor, **options: Any
) -> Tensor:
    """Mamba-2 of one sequence by its definition, token by token."""
    step = torch.nn.functional.softplus(step + options["dt_bias"]).clamp(*options["dt_limit"])
    shared = value.size(2) // key.size(2)
    query, key = (x[0].repeat_interleave(shared, 1) for x in (query, key))
    state = value.new_zeros(value.size(2), key.size(2), value.size(3))
    outputs = []
    for q, k, v, dt in zip(query, key, value[0], step[0]):
        state = state * (dt * decay).exp()[:, None, None]
        state = state + torch.einsum("h,hk,hv->hkv", dt, k, v)
        outputs.append(torch.einsum("hkv,hk->hv", state, q) + options["D"][:, None] * v)
    return torch.stack(outputs)[None]


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """The gated delta rule of one sequence by its definition, token by token."""
    assert options["use_qk_l2norm_in_kernel"]
    shared = value.size(2) // key.size(2)
    query, key = (x.repeat_interleave(shared, 2) for x in (query, key))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = value.new_zeros(value.size(2), key.size(3), value.size(3))
    outputs = []
    for q, k, v, decay, rate in zip(query[0], key[0], value[0], g[0].double().exp(), beta[0]):
        state = state * decay[:, None, None]
        error = rate[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q) * key.size(3) ** -0.5)
    return torch.stack(outputs)[None], None


def _policy_backward(model: Any, *, on_policy: bool = False) -> tuple[Tensor, Tensor]:
    def head(hidden: Tensor, targets: Tensor) -> Tensor:
        log_p = (model.lm_head(hidden) / TEMPERATURE).log_softmax(-1)
        return torch.stack(
            [log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
        )

    logprobs, entropy = torch.cat(_per_sequence(model, head), dim=1)
    v = {name: value.double() for name, value in make_vectors(len(logprobs)).items()}
    old = logprobs.detach() if on_policy else v["old_logprobs"]
    ratio = (logprobs - old).exp()
    surrogate = torch.maximum(
        -v["advantages"] * ratio, -v["advantages"] * ratio.clamp(1 - 0.2, 1 + 0.3)
    )
    gap = v["ref_logprobs"] - logprobs
    per_token = surrogate + KL_COEF * (gap.exp() - gap - 1) - ENTROPY_COEF * entropy
    (v["weights"] * per_token).sum().backward()
    return logprobs.detach(), entropy.detach()


def router_step(folder: Path, *, aux: float, z: float) -> dict[str, Any]:
    """`policy_step` with both losses of the routers, summed over the layers.

    Over all tokens, aux is E * sum over experts of (share of the choices) * (mean probability), and
    z is the mean of squared logsumexp. Returns their values and the gradients of the sum of all
    losses.
    """
    model = _load(folder)
    _policy_backward(model)
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    logits: dict[Any, list[Tensor]] = {router: [] for router in routers}
    for router in routers:
        router.register_forward_hook(lambda module, _, output: logits[module].append(output[0]))
    batch = make_batch()
    for start, end in zip(batch.cu_tokens.tolist(), batch.cu_tokens.tolist()[1:]):
        if start < end:
            model.model(input_ids=batch.tokens[start:end].long()[None], use_cache=False)
    sums = {"aux": torch.zeros((), dtype=torch.float64), "z": torch.zeros((), dtype=torch.float64)}
    for router in routers:
        x = torch.cat(logits[router])
        chosen = torch.zeros_like(x).scatter(1, x.topk(router.top_k).indices, 1.0)
        sums["aux"] += x.size(1) * (chosen.sum(0) / chosen.sum() * x.softmax(-1).mean(0)).sum()
        sums["z"] += x.logsumexp(-1).square().mean()
    (aux * sums["aux"] + z * sums["z"]).backward()
    losses = {
        f"train/moe_{name}_loss": float(total.detach()) / len(routers)
        for name, total in sums.items()
    }
    return {"losses": losses, "gradients": _gradients(model)}


def critic_step(folder: Path, head_weight: Tensor) -> dict[str, Any]:
    """Values [M] and gradients of the clipped value loss of a value head `head_weight` [1, H]."""
    model = _load(folder)
    weight = head_weight.double().requires_grad_()
    values = torch.cat(_per_sequence(model, lambda hidden, targets: (hidden @ weight.t())[:, 0]))
    v = {name: value.double() for name, value in make_vectors(len(values)).items()}
    clipped = v["values"] + (values - v["values"]).clamp(-VALUE_CLIP, VALUE_CLIP)
    per_token = 0.5 * torch.maximum((values - v["returns"]) ** 2, (clipped - v["returns"]) ** 2)
    (VALUE_COEF * (v["weights"] * per_token).sum()).backward()
    assert weight.grad is not None
    return {
        "values": values.detach(),
        "gradients": {**_gradients(model), "score.weight": weight.grad},
    }


def _gradients(model: Any) -> dict[str, Tensor]:
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return {
        on_disk: part for name, grad in named for on_disk, part in _as_on_disk(model, name, grad)
    }


def _as_on_disk(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Expert by expert, and gate apart from up: transformers stacks them when it reads a folder."""
    family: str = model.config.model_type
    if name.startswith("model."):
        name = model.prefix_on_disk + name.removeprefix("model.")
    mixtral = family in ("mixtral", "minimax_m2")
    if mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." not in name or family == "gpt_oss":
        yield name, tensor
        return
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    prefix, kind = name.rsplit(".", 1)
    for expert, one in enumerate(tensor):
        parts = {down: one} if kind == "down_proj" else dict(zip((gate, up), one.chunk(2)))
        if kind == "up_proj":
            parts = {up: one}
        yield from ((f"{prefix}.{expert}.{part}.weight", value) for part, value in parts.items())
