"""Llama 2 and 3: the plain decoder that the other families extend."""

from __future__ import annotations

from backends.megatron.convert.table import (
    OUTPUT_LAYER,
    VALUE_HEAD,
    WORD_EMBEDDING,
    Entry,
    Family,
    Split,
)

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

# All but the feed-forward nets.
TRUNK = (
    Entry(WORD_EMBEDDING, ("model.embed_tokens.weight",), Split.VOCAB),
    Entry(_M + "input_layernorm.weight", (_H + "input_layernorm.weight",), Split.REPLICATED),
    Entry(
        _M + "self_attention.linear_qkv.weight",
        (
            _H + "self_attn.q_proj.weight",
            _H + "self_attn.k_proj.weight",
            _H + "self_attn.v_proj.weight",
        ),
        Split.QKV,
    ),
    Entry(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",), Split.ROW),
    Entry(
        _M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",), Split.REPLICATED
    ),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",), Split.REPLICATED),
    Entry(OUTPUT_LAYER, ("lm_head.weight",), Split.VOCAB),
    Entry(VALUE_HEAD, ("score.weight",), Split.REPLICATED),
)

MLP = (
    Entry(
        _M + "mlp.linear_fc1.weight",
        (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight"),
        Split.GATED,
        "dense",
    ),
    Entry(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), Split.ROW, "dense"),
)

ENTRIES = (*TRUNK, *MLP)

LLAMA = Family(model_type="llama", class_prefix="Llama", entries=ENTRIES)
