"""The rows that the tables of several families share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backends.megatron.convert.table import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    OUTPUT_LAYER,
    SLIDING_ATTENTION,
    VALUE_HEAD,
    WORD_EMBEDDING,
    Entry,
    Part,
    Split,
)

M = "decoder.layers.{layer}."
H = "model.layers.{layer}."
ATTENTION_M = M + "self_attention."
ATTENTION_H = H + "self_attn."


def gated(
    megatron: str,
    hf: str,
    layers: str,
    width: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Entry, Entry]:
    """A gated feed-forward net; `names` are its gate, up and down projections."""
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    wide = tuple(Part(name, (width, "hidden")) for name in (gate, up))
    return (
        Entry(megatron + "linear_fc1.weight", wide, Split.STACKED, layers),
        Entry(megatron + "linear_fc2.weight", (Part(down, ("hidden", width)),), Split.ROW, layers),
    )


def whole(
    megatron: str, hf: str, *shape: str, split: Split = Split.REPLICATED, **options: Any
) -> Entry:
    """The row of one tensor."""
    return Entry(megatron, (Part(hf, shape),), split, **options)


def qkv(kind: str, *tail: str, where: str | None = None) -> Entry:
    """The row of three projections, or of their biases."""
    return Entry(
        ATTENTION_M + f"linear_qkv.{kind}",
        tuple(
            Part(ATTENTION_H + f"{name}_proj.{kind}", (rows, *tail))
            for name, rows in (("q", "query"), ("k", "key"), ("v", "key"))
        ),
        Split.QKV,
        where=where,
    )


# Everything except the feed-forward nets.
TRUNK = (
    whole(WORD_EMBEDDING, "model.embed_tokens.weight", "vocab", "hidden", split=Split.VOCAB),
    whole(M + "input_layernorm.weight", H + "input_layernorm.weight", "hidden"),
    qkv("weight", "hidden"),
    whole(
        ATTENTION_M + "linear_proj.weight",
        ATTENTION_H + "o_proj.weight",
        "hidden",
        "attended",
        split=Split.ROW,
    ),
    whole(M + "pre_mlp_layernorm.weight", H + "post_attention_layernorm.weight", "hidden"),
    whole("decoder.final_layernorm.weight", "model.norm.weight", "hidden"),
    whole(OUTPUT_LAYER, "lm_head.weight", "vocab", "hidden", split=Split.VOCAB),
    whole(VALUE_HEAD, "score.weight", "one", "hidden"),
)
DENSE = (*TRUNK, *gated(M + "mlp.", H + "mlp.", "dense", "ffn"))

QKV_BIAS = qkv("bias", where="add_qkv_bias")
QK_NORM = tuple(
    whole(
        ATTENTION_M + f"{name}_layernorm.weight",
        ATTENTION_H + f"{name}_norm.weight",
        "head",
        where="qk_layernorm",
    )
    for name in ("q", "k")
)


def routed(module: str, names: tuple[str, str, str]) -> tuple[Entry, ...]:
    """A router and its experts; `names` as in `gated`."""
    expert = M + "mlp.experts.local_experts.{expert}."
    return (
        whole(
            M + "mlp.router.weight", H + module + "gate.weight", "experts", "hidden", layers="moe"
        ),
        *gated(expert, H + module + "experts.{expert}.", "moe", "expert_ffn", names),
    )


EXPERTS = routed("mlp.", ("gate_proj", "up_proj", "down_proj"))


def low_rank(
    megatron: str, hf: str, *shape: str, split: Split = Split.COLUMN, **options: Any
) -> Entry:
    return whole(ATTENTION_M + megatron, ATTENTION_H + hf, *shape, split=split, **options)


WITH_LOW_QUERY: dict[str, Any] = {"where": "q_lora_rank"}
LATENT_ATTENTION = (
    low_rank("linear_q_proj.weight", "q_proj.weight", "query", "hidden", unless="q_lora_rank"),
    low_rank("linear_q_down_proj.weight", "q_a_proj.weight", "q_low", "hidden", **WITH_LOW_QUERY),
    low_rank(
        "q_layernorm.weight",
        "q_a_layernorm.weight",
        "q_low",
        split=Split.REPLICATED,
        **WITH_LOW_QUERY,
    ),
    low_rank("linear_q_up_proj.weight", "q_b_proj.weight", "query", "q_low", **WITH_LOW_QUERY),
    low_rank("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", "kv_down", "hidden"),
    low_rank("kv_layernorm.weight", "kv_a_layernorm.weight", "kv_low", split=Split.REPLICATED),
    low_rank("linear_kv_up_proj.weight", "kv_b_proj.weight", "kv_up", "kv_low"),
)

# Experts with sigmoid routers with a bias, and experts that every token passes through.
BIASED_ROUTER = (
    whole(
        M + "mlp.router.expert_bias",
        H + "mlp.gate.e_score_correction_bias",
        "experts",
        layers="moe",
        dtype="float32",
    ),
    *EXPERTS,
    *gated(M + "mlp.shared_experts.", H + "mlp.shared_experts.", "moe", "shared_ffn"),
)


def stacked(megatron: str, hf: str, split: Split, *shapes: tuple[str, ...]) -> Entry:
    """A row of experts: parts in turns in one tensor of all experts, matrices transposed."""
    parts = tuple(
        Part(
            H + "mlp.experts." + hf,
            shape,
            step=len(shapes),
            phase=phase,
            transposed=len(shape) == 2,
            of_experts=True,
        )
        for phase, shape in enumerate(shapes)
    )
    return Entry(M + "mlp.experts.local_experts.{expert}." + megatron, parts, split, "moe")


# --- gated delta rules ---

_DELTA_H = H + "linear_attn."
_CONVOLVED = ("state_keys", "state_keys", "state_values")


def hybrid(entries: tuple[Entry, ...], delta: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The rows of a model that has attention in some layers alone, and `delta` in the others."""
    attention = [entry for entry in entries if entry.megatron.startswith(ATTENTION_M)]
    return (
        *(entry for entry in entries if entry not in attention),
        *(replace(entry, layers=FULL_ATTENTION) for entry in attention),
        *delta,
    )


def _row(megatron: str, hf: str, *shape: str, split: Split = Split.REPLICATED) -> Entry:
    return whole(
        ATTENTION_M + megatron, _DELTA_H + hf, *shape, split=split, layers=LINEAR_ATTENTION
    )


def _joined(name: str, rows: tuple[str, ...], *tail: str) -> tuple[Part, ...]:
    """The parts of one tensor, which follow each other."""
    return tuple(Part(name, (own, *tail), rows[:k]) for k, own in enumerate(rows))


def _gated_delta(projections: tuple[Part, ...], group: str) -> tuple[Entry, ...]:
    """A layer with a gated delta rule; `projections` are made from its input.

    Their rows are grouped by key head, and so are those of the convolution.
    """
    convolution = _joined(_DELTA_H + "conv1d.weight", _CONVOLVED, "one", "conv_width")
    return (
        Entry(
            ATTENTION_M + "linear_in.weight", projections, Split.QKV, LINEAR_ATTENTION, group=group
        ),
        Entry(
            ATTENTION_M + "conv_weight", convolution, Split.QKV, LINEAR_ATTENTION, group="state_key"
        ),
        _row("A_log", "A_log", "state_heads", split=Split.COLUMN),
        _row("dt_bias", "dt_bias", "state_heads", split=Split.COLUMN),
        _row("norm_weight", "norm.weight", "state_value"),
        _row("linear_out.weight", "out_proj.weight", "hidden", "state_values", split=Split.ROW),
    )


# A key head's projections lie next to each other.
QWEN3_NEXT_DELTA = _gated_delta(
    (
        Part(_DELTA_H + "in_proj_qkvz.weight", ("delta_qkvz", "hidden")),
        Part(_DELTA_H + "in_proj_ba.weight", ("delta_ba", "hidden")),
    ),
    "delta_ba_of_key",
)
QWEN3_5_DELTA = _gated_delta(
    (
        *_joined(_DELTA_H + "in_proj_qkv.weight", _CONVOLVED, "hidden"),
        Part(_DELTA_H + "in_proj_z.weight", ("state_values", "hidden")),
        Part(_DELTA_H + "in_proj_b.weight", ("state_heads", "hidden")),
        Part(_DELTA_H + "in_proj_a.weight", ("state_heads", "hidden")),
    ),
    "state_key",
)

# --- blocks of Nemotron-H ---

_BLOCK_H = H + "mixer."
_MAMBA_ROWS = ("state_values", "state_keys", "state_keys")


def _mamba(megatron: str, hf: str, *shape: str, split: Split = Split.COLUMN) -> Entry:
    return whole(
        ATTENTION_M + megatron, _BLOCK_H + hf, *shape, split=split, layers=LINEAR_ATTENTION
    )


def _ungated(megatron: str, hf: str, layers: str, width: str) -> tuple[Entry, Entry]:
    """A feed-forward net without a gate."""
    up, down = (f"{hf}{name}_proj.weight" for name in ("up", "down"))
    return (
        whole(
            megatron + "linear_fc1.weight", up, width, "hidden", split=Split.COLUMN, layers=layers
        ),
        whole(
            megatron + "linear_fc2.weight", down, "hidden", width, split=Split.ROW, layers=layers
        ),
    )


_GATES, _VALUES, _KEYS, _QUERIES, _STEPS = _joined(
    _BLOCK_H + "in_proj.weight", ("state_values", *_MAMBA_ROWS, "state_heads"), "hidden"
)
MAMBA = (
    Entry(
        ATTENTION_M + "linear_in.weight",
        (_QUERIES, _KEYS, _VALUES, _GATES, _STEPS),
        Split.QKV,
        LINEAR_ATTENTION,
        group="state_key",
    ),
    *(
        Entry(
            ATTENTION_M + f"conv_{kind}",
            _joined(_BLOCK_H + f"conv1d.{kind}", _MAMBA_ROWS, *tail)[::-1],
            Split.QKV,
            LINEAR_ATTENTION,
            group="state_key",
        )
        for kind, tail in (("weight", ("one", "conv_width")), ("bias", ()))
    ),
    _mamba("A_log", "A_log", "state_heads"),
    _mamba("dt_bias", "dt_bias", "state_heads"),
    _mamba("D", "D", "state_heads"),
    _mamba("norm_weight", "norm.weight", "state_values"),
    _mamba("linear_out.weight", "out_proj.weight", "hidden", "state_values", split=Split.ROW),
)
NEMOTRON_H_ROWS = (
    whole(WORD_EMBEDDING, "model.embeddings.weight", "vocab", "hidden", split=Split.VOCAB),
    *(
        whole(M + f"{norm}_layernorm.weight", H + "norm.weight", "hidden", layers=kind)
        for norm, kinds in (
            ("input", (LINEAR_ATTENTION, FULL_ATTENTION)),
            ("pre_mlp", ("dense", "moe")),
        )
        for kind in kinds
    ),
    *MAMBA,
    *(
        replace(
            entry.renamed(lambda name: name.replace(".self_attn.", ".mixer.")),
            layers=FULL_ATTENTION,
        )
        for entry in TRUNK
        if entry.megatron.startswith(ATTENTION_M)
    ),
    *_ungated(M + "mlp.", _BLOCK_H, "dense", "ffn"),
    whole(M + "mlp.router.weight", _BLOCK_H + "gate.weight", "experts", "hidden", layers="moe"),
    whole(
        M + "mlp.router.expert_bias",
        _BLOCK_H + "gate.e_score_correction_bias",
        "experts",
        layers="moe",
        dtype="float32",
    ),
    *_ungated(
        M + "mlp.experts.local_experts.{expert}.",
        _BLOCK_H + "experts.{expert}.",
        "moe",
        "expert_ffn",
    ),
    *_ungated(M + "mlp.shared_experts.", _BLOCK_H + "shared_experts.", "moe", "shared_ffn"),
    whole("decoder.final_layernorm.weight", "model.norm_f.weight", "hidden"),
    whole(OUTPUT_LAYER, "lm_head.weight", "vocab", "hidden", split=Split.VOCAB),
    whole(VALUE_HEAD, "score.weight", "one", "hidden"),
)


# --- norms behind attention and MLP, windows ---

# One norm over all heads of queries, and one over those of keys.
NORMS_OVER_HEADS = tuple(
    whole(
        ATTENTION_M + f"{name}_layernorm.weight",
        ATTENTION_H + f"{name}_norm.weight",
        rows,
        split=Split.COLUMN,
    )
    for name, rows in (("q", "query"), ("k", "key"))
)

_NORMS_BEFORE = (M + "input_layernorm.weight", M + "pre_mlp_layernorm.weight")
_NORMS_BEHIND = (
    whole(M + "post_self_attn_layernorm.weight", H + "post_attention_layernorm.weight", "hidden"),
    whole(M + "post_mlp_layernorm.weight", H + "post_feedforward_layernorm.weight", "hidden"),
)
OLMO3_ROWS = (
    *(entry for entry in DENSE if entry.megatron not in _NORMS_BEFORE),
    *_NORMS_BEHIND,
    *NORMS_OVER_HEADS,
)
GEMMA3_ROWS = (
    *(entry for entry in DENSE if entry.megatron != _NORMS_BEFORE[1]),
    whole(_NORMS_BEFORE[1], H + "pre_feedforward_layernorm.weight", "hidden"),
    *_NORMS_BEHIND,
    *QK_NORM,
)

_BY_TYPE = (ATTENTION_M + "linear_qkv.weight", ATTENTION_M + "linear_proj.weight")
# In layers without a window heads have another size, and there is no projection of values.
GEMMA4_ROWS = (
    *(
        replace(entry, layers=SLIDING_ATTENTION)
        if entry in QK_NORM or entry.megatron in _BY_TYPE
        else entry
        for entry in GEMMA3_ROWS
    ),
    *(
        replace(entry, parts=(Part(entry.names[0], ("full_head",)),), layers=FULL_ATTENTION)
        for entry in QK_NORM
    ),
    Entry(
        _BY_TYPE[0],
        tuple(
            Part(ATTENTION_H + f"{name}_proj.weight", (rows, "hidden"))
            for name, rows in (("q", "full_query"), ("k", "full_key"))
        ),
        Split.QKV,
        layers=FULL_ATTENTION,
        group="full_head",
    ),
    whole(
        _BY_TYPE[1],
        ATTENTION_H + "o_proj.weight",
        "hidden",
        "full_query",
        split=Split.ROW,
        layers=FULL_ATTENTION,
    ),
    whole(M + "layer_scalar", H + "layer_scalar", "one"),
)
