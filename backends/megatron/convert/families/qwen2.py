"""Qwen2 and Qwen2.5: Llama with a bias on Q, K and V."""

from __future__ import annotations

from backends.megatron.convert.families.llama import ENTRIES
from backends.megatron.convert.table import Entry, Family, Split

_H = "model.layers.{layer}.self_attn."

QKV_BIAS = Entry(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    (_H + "q_proj.bias", _H + "k_proj.bias", _H + "v_proj.bias"),
    Split.QKV,
)

QWEN2 = Family(
    model_type="qwen2", class_prefix="Qwen2", entries=(*ENTRIES, QKV_BIAS), qkv_bias=True
)
