"""Qwen3-MoE: Qwen3 with routed experts in all layers, or in some."""

from __future__ import annotations

from backends.megatron.convert.families.qwen3 import QWEN3
from backends.megatron.convert.table import Entry, Experts, Family, Split

_M = "decoder.layers.{layer}.mlp."
_H = "model.layers.{layer}.mlp."
_EXPERT_M = _M + "experts.local_experts.{expert}."
_EXPERT_H = _H + "experts.{expert}."

EXPERTS = (
    Entry(_M + "router.weight", (_H + "gate.weight",), Split.REPLICATED, "moe"),
    Entry(
        _EXPERT_M + "linear_fc1.weight",
        (_EXPERT_H + "gate_proj.weight", _EXPERT_H + "up_proj.weight"),
        Split.GATED,
        "moe",
    ),
    Entry(_EXPERT_M + "linear_fc2.weight", (_EXPERT_H + "down_proj.weight",), Split.ROW, "moe"),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_prefix="Qwen3Moe",
    entries=(*QWEN3.entries, *EXPERTS),
    qk_norm=True,
    head_dim=128,
    experts=Experts(width="moe_intermediate_size", normalized="norm_topk_prob"),
)
