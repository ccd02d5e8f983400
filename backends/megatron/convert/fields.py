"""Experts and latent attention of a `config.json` as TransformerConfig fields.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.megatron.convert.rope import Rope
from backends.megatron.convert.table import FULL_ATTENTION, LINEAR_ATTENTION, Experts
from rlcore.errors import ModelError
from rlcore.hf_config.fields import Field, check_fields, refusal

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
        fields["moe_shared_expert_gate"] = experts.shared_gate
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
    kinds = config.get("mlp_layer_types")
    if kinds is not None and (len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}):
        expected = "'dense' or 'sparse' for each of num_hidden_layers"
        raise refusal(folder, "mlp_layer_types", kinds, expected)
    found = [
        kinds[layer] == "sparse"
        if kinds is not None
        else (layer + 1) % step == 0 and layer not in dense and layer >= first
        for layer in range(num_layers)
    ]
    if not any(found):
        keys = (
            "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "mlp_layer_types",
        )  # fmt: skip
        given = " and ".join(f"{key} {config[key]}" for key in keys if config.get(key))
        raise ModelError(
            f"{folder}/config.json: {given} leave no layer with experts; convert the model as a"
            " dense one"
        )
    return found


# --- latent attention -----------------------------------------------------------------------------


def latent_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of the five projections."""
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
    }


# --- states ---------------------------------------------------------------------------------------

# Letters of `hybrid_override_pattern`, and what transformers 4 called the types.
_BLOCKS = {"M": LINEAR_ATTENTION, "E": "moe", "*": FULL_ATTENTION, "-": "mlp"}
_OLD_BLOCKS = {"mamba": LINEAR_ATTENTION, "attention": FULL_ATTENTION}


def complete_blocks(folder: Path, config: dict[str, Any]) -> None:
    """Set the types of layers that are one block each, and what follows from them."""
    pattern = config["hybrid_override_pattern"]
    kinds = config["layers_block_type"]
    if kinds is None and pattern is not None:
        kinds = [_BLOCKS.get(letter, letter) for letter in pattern]
    kinds = [_OLD_BLOCKS.get(kind, kind) for kind in kinds or ()]
    if not kinds or not {*kinds} <= {*_BLOCKS.values()}:
        expected = (
            f"{', '.join(_BLOCKS.values())} for each layer, or {' '.join(_BLOCKS)} for them in"
            " hybrid_override_pattern"
        )
        raise refusal(folder, "layers_block_type", kinds or None, expected)
    config["layer_types"] = kinds
    config["num_hidden_layers"] = len(kinds)
    config["mlp_layer_types"] = ["sparse" if kind == "moe" else "dense" for kind in kinds]


def mamba_fields(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of Mamba-2, and which layers have it, in the words of linear attention."""
    heads = config["mamba_num_heads"]
    groups = config["n_groups"]
    if heads % groups:
        raise refusal(folder, "mamba_num_heads", heads, f"a multiple of the {groups} n_groups")
    return {
        "mamba_num_heads": heads,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": config["mamba_head_dim"],
        "linear_num_key_heads": groups,
        "linear_key_head_dim": config["ssm_state_size"],
        "linear_conv_kernel_dim": config["conv_kernel"],
        "linear_attention_freq": [int(kind == LINEAR_ATTENTION) for kind in config["layer_types"]],
    }


def hybrid_layers(config: Mapping[str, Any]) -> list[str]:
    """Return `layer_types`, or what transformers makes without it."""
    every = config["full_attention_interval"]
    return config["layer_types"] or [
        LINEAR_ATTENTION if (layer + 1) % every else FULL_ATTENTION
        for layer in range(config["num_hidden_layers"])
    ]


def gated_delta_fields(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of gated delta rules, and which layers have them."""
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = {f"linear_{key}": config[f"linear_{key}"] for key in keys}
    heads = sizes["linear_num_value_heads"]
    key_heads = sizes["linear_num_key_heads"]
    if heads % key_heads:
        expected = f"a multiple of the {key_heads} linear_num_key_heads"
        raise refusal(folder, "linear_num_value_heads", heads, expected)
    return {
        **sizes,
        "linear_attention_freq": [int(kind == LINEAR_ATTENTION) for kind in config["layer_types"]],
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }


def latent_scale(rope: Rope) -> dict[str, Any]:
    """The fields by which Megatron scales the scores of a latent attention under YaRN."""
    return {
        # Megatron's own positions, which are not used.
        "rope_type": "rope",
        "rotary_scaling_factor": rope.factor,
        "mscale_all_dim": rope.mscale_all_dim,
    }


# --- layers with other heads ---


def full_heads(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """(KV heads, head size) of Gemma 4's layers without a window.

    Raises ModelError unless all of them have the same, and the others those of the model.
    """
    if config["use_bidirectional_attention"] not in (None, "vision"):
        given = config["use_bidirectional_attention"]
        raise refusal(folder, "use_bidirectional_attention", given, "null or 'vision'")
    full = [str(k) for k, kind in enumerate(config["layer_types"]) if kind == FULL_ATTENTION]
    if not full or full[-1] != str(config["num_hidden_layers"] - 1):
        expected = f"{FULL_ATTENTION!r} for the last layer"
        raise refusal(folder, "layer_types", config["layer_types"], expected)
    groups = config["num_global_key_value_heads"] or config["num_key_value_heads"]
    own = {"head_dim": config["global_head_dim"], "num_key_value_heads": groups}
    if (by_layer := config["per_layer_config"]) is not None:
        found = [by_layer.get(layer) or {} for layer in full]
        fields = {key: Field("size") for key in own}
        known = {*by_layer} <= {*full} and all(given == found[-1] for given in found)
        if not known or not isinstance(found[-1], dict) or not {*found[-1]} <= fields.keys():
            expected = "head_dim and num_key_value_heads, the same for all layers without a window"
            raise refusal(folder, "per_layer_config", by_layer, expected)
        # A size that is missing is that of the other layers.
        own = {**{key: config[key] for key in own}, **found[-1]}
        check_fields(folder, own, fields, f"per_layer_config.{full[-1]}.")
    groups = own["num_key_value_heads"]
    heads = config["num_attention_heads"]
    if heads % groups:
        expected = f"a divisor of the {heads} attention heads"
        raise refusal(folder, "num_global_key_value_heads", groups, expected)
    if own["head_dim"] % 2:
        expected = "an even number, for rotary positions"
        raise refusal(folder, "global_head_dim", own["head_dim"], expected)
    return groups, own["head_dim"]
