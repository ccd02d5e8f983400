"""What `config.json` says about experts, as TransformerConfig fields. Imports neither torch nor Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.megatron.convert.table import Experts
from rlcore.errors import ModelError


def expert_fields(folder: Path, config: dict[str, Any], experts: Experts, num_layers: int) -> dict[str, Any]:
    """The `moe_*` fields. Raises ModelError for a missing number, and for a model without a single layer of experts."""
    num_experts = _integer(folder, config, "num_experts", "num_local_experts")      # transformers 5 writes either
    topk = _integer(folder, config, "num_experts_per_tok")
    if topk > num_experts:
        raise ModelError(f"{folder}/config.json: num_experts_per_tok: got {topk}, more than the {num_experts} experts")
    has_experts = _moe_layers(folder, config, num_layers)
    normalized = experts.normalized
    if isinstance(normalized, str):
        normalized = bool(config.get(normalized, False))
    fields = {
        "num_moe_experts": num_experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": _integer(folder, config, experts.width),
        # Where all layers have experts not a list: by it Megatron's checkpoints would take the layers for unlike.
        "moe_layer_freq": 1 if all(has_experts) else [int(has) for has in has_experts],
        "moe_router_score_function": "softmax",
        # A softmax over the chosen logits is the softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not normalized,
    }
    if experts.shared_width is not None:
        fields["moe_shared_expert_intermediate_size"] = _integer(folder, config, experts.shared_width)
        fields["moe_shared_expert_gate"] = True
    return fields


def _moe_layers(folder: Path, config: dict[str, Any], num_layers: int) -> list[bool]:
    """Of each layer, whether it has experts."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    found = [(layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)]
    if not any(found):
        raise ModelError(
            f"{folder}/config.json: decoder_sparse_step {step} and mlp_only_layers {list(dense)} leave no layer with experts; "
            "convert the model as a dense one"
        )
    return found


def _integer(folder: Path, config: dict[str, Any], *keys: str) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{folder}/config.json: {' or '.join(keys)}: got {value!r}, expected a positive integer")
    return value
