"""Qwen3 (dense): Llama with an RMSNorm on each head's Q and K."""

from __future__ import annotations

from backends.megatron.convert.families.llama import ENTRIES
from backends.megatron.convert.table import Entry, Family, Split

_M = "decoder.layers.{layer}.self_attention."
_H = "model.layers.{layer}.self_attn."

QK_NORM = (
    Entry(_M + "q_layernorm.weight", (_H + "q_norm.weight",), Split.REPLICATED),
    Entry(_M + "k_layernorm.weight", (_H + "k_norm.weight",), Split.REPLICATED),
)

QWEN3 = Family(
    model_type="qwen3",
    class_prefix="Qwen3",
    entries=(*ENTRIES, *QK_NORM),
    qk_norm=True,
    head_dim=128,
)
