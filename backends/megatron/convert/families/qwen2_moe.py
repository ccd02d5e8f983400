"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with routed experts, and a gated expert for every token."""

from __future__ import annotations

from backends.megatron.convert.families.qwen2 import QWEN2
from backends.megatron.convert.families.qwen3_moe import EXPERTS
from backends.megatron.convert.table import Entry, Experts, Family, Split

_M = "decoder.layers.{layer}.mlp.shared_experts."
_H = "model.layers.{layer}.mlp.shared_expert"

SHARED_EXPERT = (
    Entry(
        _M + "linear_fc1.weight",
        (_H + ".gate_proj.weight", _H + ".up_proj.weight"),
        Split.GATED,
        "moe",
    ),
    Entry(_M + "linear_fc2.weight", (_H + ".down_proj.weight",), Split.ROW, "moe"),
    Entry(_M + "gate_weight", (_H + "_gate.weight",), Split.REPLICATED, "moe"),
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    class_prefix="Qwen2Moe",
    entries=(*QWEN2.entries, *EXPERTS, *SHARED_EXPERT),
    qkv_bias=True,
    experts=Experts(
        width="moe_intermediate_size",
        normalized="norm_topk_prob",
        shared_width="shared_expert_intermediate_size",
    ),
)
