"""Rotary positions, experts and latent attention of a `config.json` as TransformerConfig fields.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.megatron.convert.table import Experts
from rlcore.errors import ModelError

# Megatron hard-codes these three of Llama 3's RoPE scaling; only the factor is an argument.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim",
}  # fmt: skip


def integer(folder: Path, config: Mapping[str, Any], *keys: str) -> int:
    """Read the first of `keys` that is given. Raises ModelError unless it is a positive integer."""
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"{folder}/config.json: {' or '.join(keys)}: got {value!r}, expected a positive integer"
        )
    return value


# --- rotary positions -----------------------------------------------------------------------------


def rope_arguments(folder: Path, config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Read (theta, scaling as GPTModel's keyword arguments)."""
    where = f"{folder}/config.json"
    theta, kind, rope = _rope(config)
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ModelError(
            f"{where}: RoPE type {kind!r} is not supported; expected default, linear or llama3"
        )
    factor = _rope_factor(where, kind, rope)
    if kind == "linear":
        return theta, {"seq_len_interpolation_factor": factor}
    for key, expected in _LLAMA3_ROPE.items():
        if float(rope.get(key, expected)) != expected:
            raise ModelError(
                f"{where}: llama3 RoPE scaling with {key} {rope[key]}; megatron-core supports"
                f" {expected:g} alone"
            )
    return theta, {"rope_scaling": True, "rope_scaling_factor": factor}


def _rope(config: Mapping[str, Any]) -> tuple[float, str, dict[str, Any]]:
    """Read (theta, type, all settings) from either spelling.

    transformers 5 writes one `rope_parameters`; before, there were `rope_theta` and `rope_scaling`.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return theta, rope.get("rope_type") or rope.get("type") or "default", rope


def _rope_factor(where: str, kind: str, rope: Mapping[str, Any]) -> float:
    factor = rope.get("factor")
    if not isinstance(factor, (int, float)):
        raise ModelError(f"{where}: {kind} RoPE scaling with factor {factor!r}, expected a number")
    return float(factor)


# --- experts --------------------------------------------------------------------------------------


def expert_fields(
    folder: Path, config: dict[str, Any], experts: Experts, num_layers: int
) -> dict[str, Any]:
    """Read the `moe_*` fields; ModelError for a missing number, and where no layer has experts."""
    num_experts = integer(folder, config, *experts.count)
    topk = integer(folder, config, "num_experts_per_tok")
    if topk > num_experts:
        raise ModelError(
            f"{folder}/config.json: num_experts_per_tok: got {topk}, more than the {num_experts}"
            " experts"
        )
    has_experts = _moe_layers(folder, config, num_layers)
    normalized = experts.normalized
    if isinstance(normalized, str):
        # transformers' defaults
        normalized = bool(config.get(normalized, experts.scoring == "sigmoid"))
    fields: dict[str, Any] = {
        "num_moe_experts": num_experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": integer(folder, config, experts.width),
        # No list where all layers have experts: because of a list Megatron's checkpoints would not
        # treat the layers as alike.
        "moe_layer_freq": 1 if all(has_experts) else [int(has) for has in has_experts],
        "moe_router_score_function": experts.scoring,
        # The softmax over the chosen logits is the softmax over all, normalised over the chosen.
        "moe_router_pre_softmax": not normalized,
    }
    if experts.scoring == "sigmoid":
        fields |= sigmoid_fields(folder, config, num_experts)
    if experts.shared_width is not None:
        fields["moe_shared_expert_intermediate_size"] = integer(
            folder, config, experts.shared_width
        )
        fields["moe_shared_expert_gate"] = True
    if experts.shared_count is not None:
        count = integer(folder, config, experts.shared_count)
        fields["moe_shared_expert_intermediate_size"] = count * fields["moe_ffn_hidden_size"]
    return fields


def sigmoid_fields(folder: Path, config: dict[str, Any], num_experts: int) -> dict[str, Any]:
    """Read the fields of a sigmoid router, which chooses among the experts of its best groups."""
    where = f"{folder}/config.json"
    for key, expected in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        if config.get(key, expected) != expected:
            raise ModelError(f"{where}: {key}: got {config[key]!r}, only {expected!r} is converted")
    groups = integer(folder, config, "n_group")
    best = integer(folder, config, "topk_group")
    if num_experts % groups or num_experts // groups < 2 or best > groups:
        raise ModelError(
            f"{where}: n_group {groups}, topk_group {best}: expected groups of at least two of the"
            f" {num_experts} experts, and no more of them chosen than there are"
        )
    topk = integer(folder, config, "num_experts_per_tok")
    reachable = best * (num_experts // groups)
    if topk > reachable:
        raise ModelError(
            f"{where}: num_experts_per_tok: got {topk}, more than the {reachable} of {best} of"
            f" {groups} groups"
        )
    scale = config.get("routed_scaling_factor")
    if not isinstance(scale, (int, float)):  # families have other defaults
        raise ModelError(f"{where}: routed_scaling_factor: got {scale!r}, expected a number")
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": best,
        "moe_router_topk_scaling_factor": float(scale),
        "moe_router_dtype": "fp32",  # as transformers computes it, whatever the model's dtype
    }


def _moe_layers(folder: Path, config: dict[str, Any], num_layers: int) -> list[bool]:
    """For each layer, whether it has experts."""
    step = config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    first = config.get("first_k_dense_replace") or 0
    found = [
        (layer + 1) % step == 0 and layer not in dense and layer >= first
        for layer in range(num_layers)
    ]
    if not any(found):
        keys = ("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace")
        given = " and ".join(f"{key} {config[key]}" for key in keys if config.get(key))
        raise ModelError(
            f"{folder}/config.json: {given} leave no layer with experts; convert the model as a"
            " dense one"
        )
    return found


# --- latent attention -----------------------------------------------------------------------------


def latent_fields(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of the five projections, and the rotary positions of each layer.

    Raises ModelError for a missing number, and for rotary positions that Megatron would compute
    otherwise.
    """
    heads = integer(folder, config, "num_attention_heads")
    if (config.get("num_key_value_heads") or heads) != heads:
        raise ModelError(
            f"{folder}/config.json: num_key_value_heads: got {config['num_key_value_heads']},"
            f" expected the {heads} attention heads: latent attention makes keys and values for"
            " each"
        )
    plain, rotary = (
        integer(folder, config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    return {
        "multi_latent_attention": True,
        "q_lora_rank": (
            None if config.get("q_lora_rank") is None else integer(folder, config, "q_lora_rank")
        ),
        "kv_lora_rank": integer(folder, config, "kv_lora_rank"),
        "qk_head_dim": plain,
        "qk_pos_emb_head_dim": rotary,
        "v_head_dim": integer(folder, config, "v_head_dim"),
        "kv_channels": plain + rotary,
        "num_query_groups": heads,
        "rope_interleave": bool(config.get("rope_interleave", True)),
        **_rotary_fields(folder, config),
    }


def latent_shapes(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a latent attention, by the last part of its Megatron name.

    Other attentions give an empty dictionary.
    """
    if not fields.get("multi_latent_attention"):
        return {}
    heads = fields["num_attention_heads"]
    hidden = fields["hidden_size"]
    latent = fields["kv_lora_rank"]
    query = heads * fields["kv_channels"]
    value = heads * fields["v_head_dim"]
    low = fields["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "linear_kv_down_proj.weight": (latent + fields["qk_pos_emb_head_dim"], hidden),
        "kv_layernorm.weight": (latent,),
        "linear_kv_up_proj.weight": (heads * fields["qk_head_dim"] + value, latent),
        "linear_proj.weight": (hidden, value),
    }
    if low is None:
        return {**shapes, "linear_q_proj.weight": (query, hidden)}
    return {
        **shapes,
        "linear_q_down_proj.weight": (low, hidden),
        "q_layernorm.weight": (low,),
        "linear_q_up_proj.weight": (query, low),
    }


def _rotary_fields(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    where = f"{folder}/config.json"
    theta, kind, rope = _rope(config)
    if kind == "default":
        return {
            "rope_type": "rope",
            "rotary_base": theta,
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        }
    if kind != "yarn":
        raise ModelError(
            f"{where}: RoPE type {kind!r} is not supported with latent attention; expected default"
            " or yarn"
        )
    if unknown := sorted(key for key in rope.keys() - _YARN if rope[key] is not None):
        raise ModelError(
            f"{where}: yarn RoPE scaling with {unknown[0]}: {rope[unknown[0]]!r} is not supported"
        )
    factor = _rope_factor(where, kind, rope)
    mscale, mscale_all_dim = (float(rope.get(key) or 0.0) for key in ("mscale", "mscale_all_dim"))
    if mscale_all_dim and not mscale:
        raise ModelError(
            f"{where}: yarn RoPE scaling with mscale_all_dim alone; megatron-core needs mscale too"
        )
    if not mscale_all_dim:
        mscale = 1.0  # transformers then goes by `factor` alone
    return {
        "rope_type": "yarn",
        "rotary_base": theta,
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": integer(
            folder, rope, "original_max_position_embeddings"
        ),
        "beta_fast": float(rope.get("beta_fast") or 32.0),
        "beta_slow": float(rope.get("beta_slow") or 1.0),
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
