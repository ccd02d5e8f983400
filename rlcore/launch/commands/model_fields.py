"""The fields of a tiny model's `config.json`, for every family that the trainer knows.

transformers' configuration class of a family declares its fields. Each of them that a size of
`init-model` determines is in `shared_fields`; what a family has otherwise is in `OWN`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING

from backends.megatron.convert.table import Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlcore.launch.commands.init_model import ModelSpec

_LATENT = {"num_key_value_heads": "num_attention_heads"}
_SPARSE = {**_LATENT, "head_dim": "qk_rope_head_dim"}
_PARTIAL = {"partial_rotary_factor": "rotary_part"}
_WINDOWS = {"layer_types": "sliding_attention", "sliding_window": "window"}
_DELTA = {**_PARTIAL, "layer_types": "linear_attention"}
# Experts are as wide as `intermediate_size` where the class has no width of their own.
_EXPERTS_ALONE = {"intermediate_size": "moe_intermediate_size"}
# By `model_type`: further fields, and those with another value than the shared one. A text is the
# name of a shared value.
OWN: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": _EXPERTS_ALONE,
    "minimax_m2": {**_EXPERTS_ALONE, **_PARTIAL},
    "gpt_oss": {**_EXPERTS_ALONE, **_WINDOWS},
    "gemma3_text": _WINDOWS,
    "gemma4_text": {
        **_WINDOWS,
        "attention_k_eq_v": True,
        "global_head_dim": "head_dim",
        "num_global_key_value_heads": "num_key_value_heads",
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    "olmo3": _WINDOWS,
    "glm4_moe": {**_PARTIAL, "attention_bias": True, "use_qk_norm": True},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "glm4_moe_lite": _SPARSE,
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "nemotron_h": {
        "layers_block_type": "blocks",
        "mamba_num_heads": "num_attention_heads",
        "mamba_head_dim": "head_dim",
        "n_groups": "num_key_value_heads",
        "ssm_state_size": "head_dim",
        "moe_shared_expert_intermediate_size": "moe_intermediate_size",
        # transformers does not tie embeddings of this family.
        "tie_word_embeddings": False,
    },
}
_TOWER = {"hidden_size": 16, "intermediate_size": 16}
_LAYERS = {**_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
_QWEN_TOWER = {
    **_TOWER, "depth": 1, "num_heads": 2, "num_position_embeddings": 16,
    "out_hidden_size": "hidden_size",
}  # fmt: skip
# By `model_type`: the vision tower of a model whose language model is a part of it.
VISION: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {**_LAYERS, "image_size": 64, "vision_use_head": False},
    "gemma4": {**_LAYERS, "num_key_value_heads": 2, "head_dim": 8},
    "mistral3": {**_LAYERS, "head_dim": 8, "image_size": 16},
    "kimi_k25": {**_LAYERS, "pos_emb_height": 4, "pos_emb_width": 4},
    "qwen3_5": _QWEN_TOWER,
    "qwen3_5_moe": _QWEN_TOWER,
}


def shared_fields(spec: ModelSpec) -> dict[str, Any]:
    """The values that sizes determine: of fields of the classes, and of names in `OWN`."""
    head = spec.hidden // spec.heads
    width = max(spec.intermediate // 2, 1)
    dense = min(1, spec.layers - 1)
    # Every fourth layer has full attention, or the last of fewer.
    every = min(4, spec.layers)
    kinds = {
        kind: [kind if (layer + 1) % every else "full_attention" for layer in range(spec.layers)]
        for kind in ("linear_attention", "sliding_attention")
    }
    blocks = ("linear_attention", "moe", "full_attention", "mlp")
    return kinds | {
        "blocks": [blocks[layer % len(blocks)] for layer in range(spec.layers)],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "sliding_window": None,
        # Short enough to hide something.
        "window": max(spec.max_positions // 8, 1),
        # The published models' quarter of a head, or what is even.
        "rotary_part": next(part for part in (0.25, 0.5, 1.0) if head * part % 2 == 0),
        # Experts: a dense first layer, and one group.
        "num_experts": spec.experts,
        "num_local_experts": spec.experts,
        "n_routed_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (spec.layers - dense),
        "num_mtp_layers": 0,
        # Latent attention, and the indexer of sparse attention.
        "q_lora_rank": spec.hidden // 2,
        "kv_lora_rank": spec.hidden // 4,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": max(head // 4 * 2, 2),
        "v_head_dim": head,
        "index_n_heads": spec.heads,
        "index_head_dim": head,
        # Gated delta rules.
        "linear_num_key_heads": spec.kv_heads,
        "linear_num_value_heads": spec.heads,
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
    }


def model_config(family: Family, shared: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a family with the `shared_fields`, as transformers has it."""
    if not family.within:
        return _language_config(family.known_as or family.model_type, shared)
    whole = CONFIG_MAPPING[family.model_type]
    text = family.text_type or whole().text_config.model_type
    vision = {key: _value(of, shared) for key, of in VISION[family.model_type].items()}
    return whole(
        text_config=_language_config(text, shared).to_dict(),
        vision_config=vision,
        tie_word_embeddings=shared["tie_word_embeddings"],
    )


def _language_config(model_type: str, shared: Mapping[str, Any]) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    declared = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in shared.items() if name in declared}
    own = {key: _value(of, shared) for key, of in OWN.get(model_type, {}).items()}
    return kind(**given | own)


def _value(given: Any, shared: Mapping[str, Any]) -> Any:
    """The shared value of a name; any other value is itself."""
    return shared[given] if isinstance(given, str) else given
