"""Rotary positions, experts and latent attention of a `config.json` as TransformerConfig fields.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.megatron.convert.config_fields import ROPE
from backends.megatron.convert.table import Experts, Family
from rlcore.errors import ModelError
from rlcore.hf_config.fields import check_fields, refusal

FULL_ATTENTION = "full_attention"

# --- rotary positions -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """The rotary positions of a model: base, kind, and the checked settings of the kind."""

    theta: float
    kind: str
    settings: Mapping[str, Any]


def read_rope(
    folder: Path, given: Mapping[str, Any], config: Mapping[str, Any], family: Family
) -> Rope:
    """Read either spelling of rotary positions, like transformers 5.

    transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`.
    A value that is given twice must be the same.

    Args:
        given: the unchanged `config.json`, to distinguish given values from defaults.
    """
    old = _one_spelling(folder, "rope_scaling", config)
    new = _one_spelling(folder, "rope_parameters", config)
    if old and new and old != new:
        raise refusal(
            folder,
            "rope_parameters and rope_scaling",
            [new, old],
            "the same in both, or one of them alone",
        )
    name = "rope_scaling" if old else "rope_parameters"
    said = old or new
    outer = config["rope_theta"]
    if "rope_theta" in given and said.get("rope_theta", outer) != outer:
        raise refusal(
            folder,
            f"rope_theta and {name}.rope_theta",
            [outer, said["rope_theta"]],
            "the same in both, or one of them alone",
        )
    kind = said.get("rope_type", "default")
    kinds = ("default", "yarn") if family.latent_attention else ("default", "linear", "llama3")
    if kind not in kinds:
        attention = "latent attention" if family.latent_attention else "its attention"
        raise refusal(
            folder, f"{name}.rope_type", kind, f"{', '.join(kinds)}, which {attention} supports"
        )
    said = {
        "rope_theta": outer,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "partial_rotary_factor": config["partial_rotary_factor"],
        **said,
    }
    partial = {"partial_rotary_factor": family.fields["partial_rotary_factor"]}
    settings = check_fields(folder, said, {**ROPE[kind], **partial}, f"{name}.")
    if settings.get("mscale_all_dim") and not settings["mscale"]:
        raise refusal(
            folder,
            f"{name}.mscale",
            settings["mscale"],
            "a number above 0, as megatron-core needs it together with mscale_all_dim",
        )
    return Rope(float(settings["rope_theta"]), kind, settings)


def _one_spelling(folder: Path, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under one name; `rope_type` may have its old name `type`."""
    said = dict(config[name] or {})
    # transformers reads a key that names a layer type as the settings of these layers.
    if nested := sorted(k for k, v in said.items() if k == FULL_ATTENTION or isinstance(v, dict)):
        raise refusal(
            folder, f"{name}.{nested[0]}", said[nested[0]], "one set of positions for all layers"
        )
    if said:
        kind = said.pop("type", said.get("rope_type", "default"))
        if said.setdefault("rope_type", kind) != kind:
            got = [said["rope_type"], kind]
            raise refusal(folder, f"{name}.rope_type and {name}.type", got, "the same")
    return said


def rope_arguments(rope: Rope) -> dict[str, Any] | None:
    """Scaling and partial rotation as GPTModel's keyword arguments."""
    part = float(rope.settings["partial_rotary_factor"] or 1.0)
    found: dict[str, Any] = {} if part == 1.0 else {"rotary_percent": part}
    if rope.kind == "linear":
        found["seq_len_interpolation_factor"] = float(rope.settings["factor"])
    if rope.kind == "llama3":
        found |= {"rope_scaling": True, "rope_scaling_factor": float(rope.settings["factor"])}
    return found or None


# --- experts --------------------------------------------------------------------------------------


def expert_fields(
    folder: Path, config: Mapping[str, Any], experts: Experts, num_layers: int
) -> dict[str, Any]:
    """Read the `moe_*` fields. Raises ModelError if keys disagree or no layer has experts."""
    # The number of experts may be given under two names.
    given = [config[key] for key in experts.count]
    counts = {*given} - {None}
    if len(counts) != 1:
        raise refusal(
            folder,
            " or ".join(experts.count),
            given if counts else None,
            "a positive integer" + (", the same under both names" if counts else ""),
        )
    num_experts: int = counts.pop()
    topk = config["num_experts_per_tok"]
    if topk > num_experts:
        raise refusal(folder, "num_experts_per_tok", topk, f"at most the {num_experts} experts")
    has_experts = _moe_layers(folder, config, num_layers)
    normalized = experts.normalized
    if isinstance(normalized, str):
        normalized = config[normalized]
    width = config[experts.width]
    fields: dict[str, Any] = {
        "num_moe_experts": num_experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        # If all layers have experts, no list is given: with a list Megatron's checkpoints would not
        # treat the layers as equal.
        "moe_layer_freq": 1 if all(has_experts) else [int(has) for has in has_experts],
        "moe_router_score_function": experts.scoring,
        # A softmax over the chosen logits equals the softmax over all, normalised over the chosen.
        "moe_router_pre_softmax": not normalized,
    }
    if experts.scoring == "sigmoid":
        fields |= _sigmoid_fields(folder, config, num_experts)
    if experts.shared_width is not None:
        fields["moe_shared_expert_intermediate_size"] = config[experts.shared_width]
        fields["moe_shared_expert_gate"] = True
    if experts.shared_count is not None:
        fields["moe_shared_expert_intermediate_size"] = config[experts.shared_count] * width
    return fields


def _sigmoid_fields(folder: Path, config: Mapping[str, Any], num_experts: int) -> dict[str, Any]:
    """Read the fields of a sigmoid router, which chooses among the experts of its best groups."""
    groups = config["n_group"]
    best = config["topk_group"]
    if num_experts % groups or num_experts // groups < 2 or best > groups:
        raise ModelError(
            f"{folder}/config.json: n_group {groups}, topk_group {best}: expected groups of at"
            f" least two of the {num_experts} experts, and no more of them chosen than there are"
        )
    topk = config["num_experts_per_tok"]
    reachable = best * (num_experts // groups)
    if topk > reachable:
        raise refusal(
            folder,
            "num_experts_per_tok",
            topk,
            f"at most the {reachable} experts of {best} of {groups} groups",
        )
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": best,
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        # transformers computes it in fp32, whatever the model's dtype.
        "moe_router_dtype": "fp32",
    }


def _moe_layers(folder: Path, config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """For each layer, whether it has experts."""
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    first = config.get("first_k_dense_replace", 0)
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


def latent_fields(config: Mapping[str, Any], rope: Rope) -> dict[str, Any]:
    """Read the sizes of the five projections, and the rotary positions of each layer."""
    plain = config["qk_nope_head_dim"]
    rotary = config["qk_rope_head_dim"]
    return {
        "multi_latent_attention": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": plain,
        "qk_pos_emb_head_dim": rotary,
        "v_head_dim": config["v_head_dim"],
        "kv_channels": plain + rotary,
        "rope_interleave": config["rope_interleave"],
        **_rotary_fields(rope),
    }


def _rotary_fields(rope: Rope) -> dict[str, Any]:
    if rope.kind == "default":
        return {
            "rope_type": "rope",
            "rotary_base": rope.theta,
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        }
    settings = rope.settings
    mscale, mscale_all_dim = (float(settings[key] or 0.0) for key in ("mscale", "mscale_all_dim"))
    if not mscale_all_dim:
        # transformers then uses `factor` alone.
        mscale = 1.0
    return {
        "rope_type": "yarn",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": float(settings["factor"]),
        "original_max_position_embeddings": settings["original_max_position_embeddings"],
        "beta_fast": float(settings["beta_fast"] or 32.0),
        "beta_slow": float(settings["beta_slow"] or 1.0),
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }
