"""The latent attention of a `config.json` as LatentConfig fields.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.megatron.convert.keys import integer
from rlcore.errors import ModelError

_YARN = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim",
}  # fmt: skip


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
    """Read the rotary positions from either spelling.

    transformers 5 writes one `rope_parameters`; before, there were `rope_theta` and `rope_scaling`.
    """
    where = f"{folder}/config.json"
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
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
    if not isinstance(rope.get("factor"), (int, float)):
        raise ModelError(
            f"{where}: yarn RoPE scaling with factor {rope.get('factor')!r}, expected a number"
        )
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
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": integer(
            folder, rope, "original_max_position_embeddings"
        ),
        "beta_fast": float(rope.get("beta_fast") or 32.0),
        "beta_slow": float(rope.get("beta_slow") or 1.0),
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
