"""Mixtral: Llama with routed experts in every layer."""

from __future__ import annotations

from backends.megatron.convert.families.llama import TRUNK
from backends.megatron.convert.table import Entry, Experts, Family, Split

_M = "decoder.layers.{layer}.mlp."
_H = "model.layers.{layer}.block_sparse_moe."
_EXPERT_M = _M + "experts.local_experts.{expert}."
_EXPERT_H = _H + "experts.{expert}."

EXPERTS = (
    Entry(_M + "router.weight", (_H + "gate.weight",), Split.REPLICATED, "moe"),
    Entry(
        _EXPERT_M + "linear_fc1.weight",
        (_EXPERT_H + "w1.weight", _EXPERT_H + "w3.weight"),
        Split.GATED,
        "moe",
    ),
    Entry(_EXPERT_M + "linear_fc2.weight", (_EXPERT_H + "w2.weight",), Split.ROW, "moe"),
)

MIXTRAL = Family(
    model_type="mixtral",
    class_prefix="Mixtral",
    entries=(*TRUNK, *EXPERTS),
    experts=Experts(width="intermediate_size", normalized=True),
)
