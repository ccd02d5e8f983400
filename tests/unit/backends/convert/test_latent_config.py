"""Latent attention and sigmoid routers: fields of a folder, refusals, and the choice of experts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from backends.megatron.checks.layout import check_layout, check_lengths
from backends.megatron.convert.architecture import Architecture, model_entries, tensor_shapes
from backends.megatron.convert.read import read_architecture
from backends.megatron.convert.rope import Rope
from backends.megatron.cpu.shim import importing_megatron
from backends.megatron.model.layers import choose_layers
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError, ModelError, RunFailed

with importing_megatron():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from backends.megatron.backend import MegatronBackend
    from backends.megatron.batch.cp_layout import PackLayout
    from backends.megatron.model import layer_specs
    from backends.megatron.model.attention.core import bucketed_attention
    from backends.megatron.model.elementwise import SwiGLU
    from backends.megatron.model.grouped_experts import GroupedExperts
    from backends.megatron.model.moe import PackRouter, SigmoidRouter
    from backends.megatron.training.passes import Model

# As DeepSeek writes it, before transformers 5.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "vocab_size": 31,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "q_lora_rank": 16, "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1,
                     "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def read(folder: Path, **changes: Any) -> Architecture:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return read_architecture(folder, weights=False)


def test_what_the_config_says(tmp_path: Path) -> None:
    arch = read(tmp_path)
    expected = {
        "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 10, "rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0,
        "num_moe_experts": 8, "moe_router_topk": 3, "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5, "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 48,
    }  # fmt: skip
    assert {key: arch.transformer[key] for key in expected} == expected
    assert "moe_shared_expert_gate" not in arch.transformer
    rope = Rope("yarn", 50000.0, 8, True, factor=40.0, original_length=4096, mscale_all_dim=1.0)
    assert arch.ropes == (rope,) * 4


def test_plain_rotary_positions(tmp_path: Path) -> None:
    arch = read(tmp_path, rope_scaling=None)
    assert arch.ropes == (Rope("default", 50000.0, 8, interleaved=True),) * 4
    assert arch.transformer["mscale_all_dim"] == 0.0, "scores would be scaled"


YARN = CONFIG["rope_scaling"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads: got 2, expected the 4 attention heads"),
        ({"q_lora_rank": 0}, "q_lora_rank: got 0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.rope_type: got 'linear', expected default, yarn, which latent attention",
        ),
        (
            {"rope_scaling": {**YARN, "attention_factor": -1.2}},
            "rope_scaling.attention_factor: got -1.2",
        ),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate: got 1"),
        ({"rope_scaling": {**YARN, "mscale": -1}}, "rope_scaling.mscale: got -1"),
        ({"rope_scaling": {**YARN, "factor": None}}, "rope_scaling.factor: got None"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": None}},
            "original_max_position_embeddings: got None",
        ),
        ({"scoring_func": "softmax"}, "scoring_func: got 'softmax', expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method: got 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: got 2"),
        (
            {"n_group": 3},
            "n_group 3, topk_group 2: expected groups of at least two of the 8 experts",
        ),
        ({"n_group": 8}, "n_group 8, topk_group 2: expected groups of at least two"),
        ({"topk_group": 5}, "n_group 4, topk_group 5"),
        (
            {"topk_group": 1},
            "num_experts_per_tok: got 3, expected at most the 2 experts of 1 of 4 groups",
        ),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace 4 leave no layer with experts"),
        (
            {"model_type": "kimi_linear"},
            "DeepseekV3ForCausalLM with model_type 'kimi_linear' is not converted",
        ),
    ],
)
def test_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, **changes)
    assert words in str(caught.value)


@pytest.mark.parametrize("low_rank", [16, None])
def test_names_and_shapes_are_those_of_transformers(low_rank: int | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    changes = {"q_lora_rank": low_rank, "num_nextn_predict_layers": 1}
    arch = read(tmp_path, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config.from_pretrained(tmp_path))
    theirs = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if ".mlp.experts." not in name
    }
    ours = {
        name: shape
        for entry in model_entries(arch, "lm")
        for name, shape in tensor_shapes(arch, entry).items()
    }
    assert {name: shape for name, shape in ours.items() if ".mlp.experts." not in name} == theirs
    assert not any(name.startswith("model.layers.4") for name in ours), (
        "layers that predict further tokens are left out"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kv_lora_rank": 23},
            r"2 does not divide the model's kv_lora_rank \+ qk_rope_head_dim \(31\)",
        ),
        ({"q_lora_rank": 15}, r"2 does not divide the model's q_lora_rank \(15\)"),
    ],
)
def test_tensor_parallelism_cuts_the_low_rank_forms(
    changes: dict[str, int], words: str, tmp_path: Path
) -> None:
    arch = read(tmp_path, **changes)
    parallel = ParallelConfig(tensor=2, sequence=True)
    with pytest.raises(ConfigError, match=words):
        check_layout(arch, parallel, 2)
    check_layout(read(tmp_path), parallel, 2)
    check_layout(read(tmp_path, q_lora_rank=None), parallel, 2)


def test_local_layers_also_where_transformer_engine_is_installed() -> None:
    layers = choose_layers(
        "auto", device="cuda", installed=True, deterministic=False, local_part="latent attention"
    )
    assert layers.kind == "local"
    assert "latent attention" in layers.reason


@pytest.mark.parametrize(
    ("score", "expected"), [("sigmoid", SigmoidRouter), ("softmax", PackRouter)]
)
def test_transformer_engines_layers_have_the_same_router(
    score: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-4.5 has sigmoid routers without latent attention."""
    monkeypatch.setattr(layer_specs, "HAVE_TE", True)
    monkeypatch.setattr(
        layer_specs, "get_gpt_layer_with_transformer_engine_spec",
        lambda num_experts, **_: get_gpt_layer_local_spec(num_experts=num_experts),
    )  # fmt: skip
    config: Any = SimpleNamespace(qk_layernorm=False, moe_router_score_function=score)
    assert layer_specs.te_layer_spec(config, 4, None).submodules.mlp.submodules.router is expected


def test_a_sequence_beyond_dense_attention_is_refused() -> None:
    arch: Any = SimpleNamespace(family="deepseek_v32", max_tokens=8)
    check_lengths([8, 3], arch)
    check_lengths([9], SimpleNamespace(max_tokens=None))  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"9 tokens, more than index_topk of deepseek_v32 \(8\)"):
        check_lengths([8, 9], arch)


@pytest.mark.parametrize("shorter", ["policy", "reference", "critic"])
def test_the_lengths_of_a_batch_are_those_of_every_model(shorter: str) -> None:
    models: dict[str, Any] = {
        name: object.__new__(Model) for name in ("policy", "reference", "critic")
    }
    for name, model in models.items():
        longest = 8 if name == shorter else None
        model.arch = SimpleNamespace(family="glm_moe_dsa", max_tokens=longest)
    backend = object.__new__(MegatronBackend)
    backend.policy = models["policy"]
    backend.frozen = {"reference": models["reference"]}
    backend.critic = models["critic"]
    batch: Any = SimpleNamespace(lengths=torch.tensor([3, 9]))
    with pytest.raises(RunFailed, match=r"9 tokens, more than index_topk of glm_moe_dsa \(8\)"):
        backend.load_batch(batch, None)


def test_parts_of_a_layer_are_replaced_in_specs_that_are_partial_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As megatron-core 0.17 and later make them, where `spec.module = ...` would do nothing."""

    def call(spec: Any) -> Any:
        return partial(spec.module, submodules=spec.submodules)

    def later(**options: Any) -> Any:
        layer = get_gpt_layer_local_spec(**options)
        mlp = layer.submodules.mlp
        mlp.submodules.experts = call(mlp.submodules.experts)
        mlp.submodules.shared_experts = call(mlp.submodules.shared_experts)
        layer.submodules.mlp = call(mlp)
        return layer

    monkeypatch.setattr(layer_specs, "get_gpt_layer_local_spec", later)
    config: Any = SimpleNamespace(
        qk_layernorm=False, multi_latent_attention=False, normalization="RMSNorm",
        moe_router_score_function="softmax", activation_func_clamp_value=None, activation_func=None,
    )  # fmt: skip
    mlp = layer_specs.submodules_of(layer_specs.local_layer_spec(config, 4, None).submodules.mlp)
    assert mlp.router is PackRouter
    assert mlp.experts.func is GroupedExperts
    for net in (mlp.experts, mlp.shared_experts):
        assert layer_specs.submodules_of(net).activation_func is SwiGLU


def router(config: DeepseekV3Config, theirs: DeepseekV3TopkRouter) -> SigmoidRouter:
    """Ours without Megatron's constructor, which asks for process groups."""
    ours = SigmoidRouter.__new__(SigmoidRouter)
    torch.nn.Module.__init__(ours)
    ours.config = SimpleNamespace(
        moe_router_num_groups=config.n_group, moe_router_group_topk=config.topk_group,
        moe_z_loss_coeff=None,
        moe_router_pre_softmax=not config.norm_topk_prob,
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
    )  # fmt: skip
    ours.num_experts = config.num_local_experts
    ours.topk = config.num_experts_per_tok
    ours.router_replay = None
    ours.register_buffer("expert_bias", theirs.e_score_correction_bias.clone())
    return ours.eval()


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("groups", "best", "topk"), [(1, 1, 1), (1, 1, 3), (4, 2, 3), (4, 1, 4), (2, 2, 8), (4, 4, 4)]
)
def test_the_choice_and_the_weights_are_those_of_transformers(
    groups: int, best: int, topk: int, normalized: bool
) -> None:
    """Megatron's own router differs with one expert a token, and less than two a group."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=8,
        n_routed_experts=16,
        n_group=groups,
        topk_group=best,
        num_experts_per_tok=topk,
        norm_topk_prob=normalized,
    )
    theirs = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        theirs.weight.normal_()
        theirs.e_score_correction_bias.normal_(0.0, 0.3)
    logits, weights, chosen = theirs(torch.randn(64, 8))
    probs, chosen_map = router(config, theirs).routing(logits[:, None])
    expected = torch.zeros(64, 16).scatter(1, chosen, weights)
    assert torch.equal(chosen_map, expected != 0)
    torch.testing.assert_close(probs, expected)


def test_the_bias_is_fp32_in_any_model() -> None:
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(hidden_size=8, n_routed_experts=16, n_group=1, topk_group=1)
    )
    theirs.e_score_correction_bias.normal_()
    ours = router(DeepseekV3Config(n_routed_experts=16), theirs)
    assert torch.equal(ours.bfloat16().expert_bias, theirs.e_score_correction_bias)


def test_values_of_another_width_than_keys() -> None:
    torch.manual_seed(0)
    lengths = [5, 3, 9]
    query = torch.randn(17, 2, 12)
    key = torch.randn(17, 2, 12)
    value = torch.randn(17, 2, 7)
    out = bucketed_attention(
        query, key, value, PackLayout.of_lengths(lengths, torch.device("cpu")), 0.3
    )
    expected = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value))):
        scores = 0.3 * torch.einsum("qhd,khd->hqk", q, k)
        seen = torch.ones(len(q), len(q)).tril().bool()
        expected.append(
            torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v
            ).flatten(1)
        )
    torch.testing.assert_close(out, torch.cat(expected))
