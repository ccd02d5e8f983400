"""Tiny Hugging Face folders of every family, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlcore.hf_folder import INDEX
from tests.language_models import VISION, draw

VOCAB = 31  # odd, so that TP 2 pads it

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
}

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

# Four key heads, for TP 4.
DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "num_hidden_layers": None, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 10,
    "n_groups": 4, "ssm_state_size": 6, "n_routed_experts": 4, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
# name -> (config class, further keys, dtype)
MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4}, torch.float32),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}, torch.bfloat16),
    "qwen2": ("Qwen2Config", {}, torch.bfloat16),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}, torch.float32),
    # One KV head, which TP 2 divides.
    "qwen2_mqa": ("Qwen2Config", {"num_key_value_heads": 1}, torch.bfloat16),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, torch.float32),
    "qwen3_tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}, torch.bfloat16),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        torch.float32,
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 16}, torch.bfloat16),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, torch.float32),
    "deepseek_v3": ("DeepseekV3Config", LATENT, torch.bfloat16),
    "deepseek_v32": (
        "DeepseekV32Config",
        {**LATENT, "index_n_heads": 2, "index_head_dim": 16},
        torch.bfloat16,
    ),
    "deepseek_v3_plain": (
        "DeepseekV3Config",
        {**LATENT, "q_lora_rank": None, "tie_word_embeddings": True},
        torch.float32,
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        torch.bfloat16,
    ),
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 16}, torch.bfloat16),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {"model_type": "gemma3_text", **SIZES, "head_dim": 16},
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16,
                "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
                "image_size": 16, "vision_use_head": False,
            },
            "mm_tokens_per_image": 4,
        },
        torch.bfloat16,
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": {
                "model_type": "gemma4_text", **SIZES, "num_key_value_heads": 4, "head_dim": 8,
                "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4,
            },
        },
        torch.bfloat16,
    ),
    "olmo3": ("Olmo3Config", {}, torch.float32),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        torch.bfloat16,
    ),
    "reward": (
        "Qwen3Config",
        {"head_dim": 16, "tie_word_embeddings": True, "num_labels": 1},
        torch.float32,
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        },
        torch.bfloat16,
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", LATENT, torch.bfloat16),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}, torch.float32),
    "smollm3": ("SmolLM3Config", {}, torch.bfloat16),
    # A language model inside a larger one, whose other tensors exports carry.
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {"model_type": "ministral3", **SIZES, "head_dim": 16},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
                "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "patch_size": 4,
                "image_size": 16,
            },
            "tie_word_embeddings": False,
        },
        torch.float32,
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        torch.bfloat16,
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": True}, torch.float32),
    # The language model of a folder with a vision tower.
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40, "vision_config": VISION},
        torch.bfloat16,
    ),
    # A layer is one block.
    "nemotron_h": (
        "NemotronHConfig",
        {**MAMBA, "layers_block_type": ["mamba", "moe", "attention", "mamba"]},
        torch.bfloat16,
    ),
    "nemotron_h_dense": (
        "NemotronHConfig",
        {**MAMBA, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
        torch.float32,
    ),
}  # fmt: skip


def auto_class(name: str) -> Any:
    """The class by which transformers reads a model's folder."""
    import transformers

    keys = MODELS[name][1]
    if "num_labels" in keys:
        return transformers.AutoModelForSequenceClassification
    whole = "text_config" in keys
    return transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM


def write_model(name: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write random weights (biases and norms too) in several shards, with a tokenizer's files."""
    import transformers

    kind, keys, dtype = MODELS[name]
    sizes = {} if "text_config" in keys else {**SIZES, "pad_token_id": 0}
    given = {**sizes, **keys, **overrides}
    torch.manual_seed(len(name) + 100 * seed)
    if ("vision_config" in keys and not sizes) or "num_labels" in keys:
        model = auto_class(name).from_config(getattr(transformers, kind)(**given))
    else:
        model = draw(kind, given)
    model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.15)
        for router in model.modules():
            if hasattr(router, "e_score_correction_bias"):  # fp32 in every folder
                size = router.e_score_correction_bias.numel()
                router.e_score_correction_bias = torch.randn(size)
    model.save_pretrained(folder, max_shard_size="20KB")
    if "n_routed_experts" in keys and "mamba_num_heads" not in keys:
        layer = f"model.layers.{given['num_hidden_layers']}"
        router = {f"{layer}.mlp.gate.e_score_correction_bias": torch.randn(4)}
        _add_carried(folder, {f"{layer}.eh_proj.weight": torch.randn(32, 64).to(dtype)} | router)
    if name == "nemotron_h" or ("linear_num_key_heads" in keys and "num_experts" in keys):
        _add_carried(folder, {"mtp.fc.weight": torch.randn(32, 64).to(dtype)})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def _add_carried(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors of what predicts further tokens, which exports carry."""
    save_file(tensors, folder / "predict.safetensors", {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "predict.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
