"""The experts of a `config.json` as TransformerConfig fields.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.megatron.convert.keys import integer
from backends.megatron.convert.table import Experts
from rlcore.errors import ModelError


def expert_fields(
    folder: Path, config: dict[str, Any], experts: Experts, num_layers: int
) -> dict[str, Any]:
    """Read the `moe_*` fields.

    Raises ModelError for a missing number, and for a model without a single layer of experts.
    """
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
