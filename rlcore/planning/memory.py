"""Bytes of one rank: weights, gradients, optimizer, saved activations, head.

Checked against real tensors in tests/parity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

from rlcore.planning.shape import ModelShape

Recompute = Literal[
    "none",
    "core_attn",
    "mlp",
    "moe",
    "core_attn+mlp",
    "core_attn+moe",
    "mlp+moe",
    "core_attn+mlp+moe",
    "full",
]


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a model, and how its training step runs."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    sequence: bool = False
    distributed: bool = False
    recompute: Recompute = "none"
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; empty: even

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_data(self) -> int:
        """The number of ranks that hold copies of the same experts."""
        return self.gpus // (self.expert_tensor * self.expert * self.pipeline)

    def stage_layers(self, shape: ModelShape, stage: int) -> int:
        """Return the number of layers of a pipeline stage."""
        return self.stages[stage] if self.stages else shape.layers // self.pipeline

    def of_stage(self, shape: ModelShape, stage: int) -> ModelShape:
        """Return the shape of a pipeline stage's layers.

        Experts are counted as in an average stage where layers without are mixed with the others.
        """
        layers = self.stage_layers(shape, stage)
        moe = layers * shape.moe_layers / shape.layers
        if shape.dense_first and self.virtual_pipeline == 1:
            before = sum(self.stage_layers(shape, k) for k in range(stage))
            moe = layers - min(max(shape.dense_first - before, 0), layers)
        return replace(shape, layers=layers, moe_layers=moe)


@dataclass(frozen=True)
class Load:
    """The size of a micro-batch."""

    tokens: int  # slots of a pack, over all context-parallel ranks
    micro_batches: int  # of an optimizer step
    trainable: int  # of the pack's tokens, at most
    dtype_bytes: int = 2
    vocab_multiple: int = 1
    chunk_elements: int = 1 << 22
    # Whether norms are composed, as torch's RMSNorm on a CPU: they keep normalised rows, in fp32.
    composed_norm: bool = False
    routing_skew: float = 1.0  # tokens of the rank's experts over an even share


@dataclass(frozen=True)
class Weights:
    """The parameters of one rank: those that data parallelism copies, and the experts'."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.expert


def rank_weights(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    *,
    vocab_multiple: int = 1,
    value_head: bool = False,
) -> Weights:
    """Return the parameters of a rank of pipeline stage `stage`.

    A critic has a value head [H], on every tensor-parallel rank, and no LM head.
    """
    here = layout.of_stage(shape, stage)
    layers = here.layers
    moe = here.moe_layers
    tp = layout.tensor
    dense = layers * (shape.attention / tp + shape.norms) + (layers - moe) * shape.mlp / tp
    dense += moe * (shape.shared / tp + shape.router)
    vocabulary = padded_vocab(shape, layout, vocab_multiple) * shape.hidden / tp
    first = stage == 0
    last = stage == layout.pipeline - 1
    dense += vocabulary * first + shape.hidden * last
    if value_head:
        dense += shape.hidden * last
    elif last and not (shape.tied and first):
        dense += vocabulary
    return Weights(round(dense), round(moe * shape.routed / (layout.expert * layout.expert_tensor)))


def padded_vocab(shape: ModelShape, layout: Layout, multiple: int) -> int:
    """Return the size of the vocabulary, padded so that tensor parallelism can cut it."""
    return -(-shape.vocab // (multiple * layout.tensor)) * multiple * layout.tensor


def gradient_bytes(weights: Weights) -> int:
    """fp32, in buffers of the size of the weights."""
    return 4 * weights.total


def optimizer_bytes(weights: Weights, layout: Layout, *, dtype_bytes: int) -> int:
    """Return the bytes of two fp32 moments, and of fp32 weights beside bf16 ones.

    A distributed optimizer cuts them over the ranks that hold copies. A step takes no more: AdamW
    is one kernel on CUDA.
    """
    each = 8 + (4 if dtype_bytes < 4 else 0)
    if not layout.distributed:
        return each * weights.total
    return round(
        each
        * (weights.dense / (layout.data * layout.context) + weights.expert / layout.expert_data)
    )


# --- activations ----------------------------------------------------------------------------------


def training_bytes(
    shape: ModelShape, layout: Layout, load: Load, stage: int, *, lm_head: bool = True
) -> int:
    """Return the most that forward and backward passes hold at once beside the model's state.

    The head has ended when the layers run backward, and its own peak comes before.
    """
    saved = _saved_bytes(shape, layout, load, stage)
    here = layout.of_stage(shape, stage)
    in_layer = _again_bytes(here, layout, load) + _transient_bytes(here, layout, load)
    if stage == 0:
        in_layer = max(
            in_layer, _embedding_bytes(shape, layout, load) - _pack_bytes(here, layout, load)
        )
    if stage < layout.pipeline - 1:
        return round(saved + in_layer)
    head = _head_bytes(shape, layout, load)
    head += head_peak_bytes(shape, layout, load) if lm_head else 0
    return round(saved + max(in_layer, head))


def activation_bytes(shape: ModelShape, layout: Layout, load: Load, stage: int) -> int:
    """Return what the forward passes in flight save for the backward pass, the head included."""
    # What a layer recomputes exists while it runs backward; the head's part is gone by then.
    again = _again_bytes(layout.of_stage(shape, stage), layout, load)
    head = _head_bytes(shape, layout, load) if stage == layout.pipeline - 1 else 0.0
    return round(_saved_bytes(shape, layout, load, stage) + max(again, head))


def gather_buffer_bytes(shape: ModelShape, layout: Layout, load: Load) -> int:
    """Return the memory that Megatron keeps for the gathers of sequence parallelism.

    All layers use it in turn.
    """
    shared = layout.sequence and layout.tensor > 1
    return round(load.dtype_bytes * load.tokens / layout.context * shape.hidden) if shared else 0


def scoring_bytes(shape: ModelShape, layout: Layout, load: Load, stage: int) -> int:
    """Return the most that a layer holds in a pass without gradients."""
    shape = layout.of_stage(shape, stage)
    t = load.tokens / layout.context
    s = t / layout.tensor if layout.sequence else t
    b = load.dtype_bytes
    residual = 3 * b * s * shape.hidden
    # the MLP's first product and SwiGLU, or SwiGLU and its second product
    width = shape.ffn / layout.tensor
    moments = [b * t * max(3 * width, width + shape.hidden) + residual]
    if shape.moe_layers:
        rows = s * shape.topk * layout.expert_tensor * load.routing_skew
        moments.append(
            b * rows * shape.hidden + _experts_transient_bytes(shape, layout, load) + residual
        )
    if stage == layout.pipeline - 1:
        # hidden states gathered for the head, its rows, and the tiles
        tiles = (8 + b * (b < 4)) * load.chunk_elements
        gathered = t * shape.hidden * layout.sequence
        moments.append(b * (gathered + _targets(layout, load) * shape.hidden) + tiles)
    return round(max(moments))


def _targets(layout: Layout, load: Load) -> float:
    """Return the targets of the context-parallel rank that has most, the last of a pack's tokens.

    Of 2 x CP chunks a rank has one from the front and its counterpart from the back.
    """
    chunks = 2 * layout.context
    prompt = chunks * (1 - load.trainable / load.tokens)
    parts = [min(max(k + 1 - prompt, 0.0), 1.0) for k in range(chunks)]
    most = max(parts[k] + parts[chunks - 1 - k] for k in range(layout.context))
    return most * load.tokens / chunks


def _saved_bytes(shape: ModelShape, layout: Layout, load: Load, stage: int) -> float:
    """Return what the layers keep from their forward to their backward pass."""
    here = layout.of_stage(shape, stage)
    in_flight = layers_in_flight(shape, layout, load.micro_batches, stage)
    return _pack_bytes(here, layout, load) * in_flight / max(here.layers, 1)


def _pack_bytes(here: ModelShape, layout: Layout, load: Load) -> float:
    """Return what the layers `here` keep of one pack."""
    return _layer_bytes(here, layout, load) * here.layers + _rotary_bytes(here, layout, load)


def _embedding_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return what the embedding's backward pass holds, when its pack's layers have run theirs.

    The gradient of its weight is whole, in the model's dtype, before it is added to fp32's; the
    gradient of its output is gathered.
    """
    vocabulary = padded_vocab(shape, layout, load.vocab_multiple) / layout.tensor
    return load.dtype_bytes * shape.hidden * (vocabulary + load.tokens / layout.context)


def _again_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return what a recomputed layer saves while it runs backward."""
    if layout.recompute == "none":
        return 0.0
    kept = 0.0 if layout.recompute == "full" else _layer_bytes(shape, layout, load)
    return _layer_bytes(shape, layout, load, recompute="none") - kept


def _transient_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return what exists inside a layer only, at its largest moment, beside what it saves."""
    moments = [0.0]
    if shape.moe_layers < shape.layers:
        moments.append(_mlp_transient_bytes(shape, layout, load))
        moments.append(_mlp_gradient_bytes(shape, layout, load))
    if shape.moe_layers:
        moments.append(_experts_transient_bytes(shape, layout, load))
    return max(moments)


def _mlp_gradient_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return what the backward pass of an MLP's first product holds: it counts in small packs.

    The gradient of its weight is in the model's dtype before it is added to fp32's. SwiGLU's saved
    rows are gone by then, but for the gradient of its input.
    """
    t = load.tokens / layout.context
    width = shape.ffn / layout.tensor
    return load.dtype_bytes * (2 * width * shape.hidden + t * shape.hidden - t * width)


def _mlp_transient_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return what SwiGLU's backward pass holds.

    It makes the gradient of its input, which is twice as wide as its output, and two products,
    from the gradient of its output, which itself is free by then. So is nothing of the layer's
    residual stream, whose gradient comes twice.
    """
    t = load.tokens / layout.context
    s = t / layout.tensor if layout.sequence else t
    return load.dtype_bytes * (4 * t * shape.ffn / layout.tensor + 2 * s * shape.hidden)


def _experts_transient_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return what the forward pass of a layer of experts holds beside what it saves.

    The rows before and after their exchange live until the layer ends. Where a rank has several
    experts, the rows are sorted, and their outputs are there twice: one by one and joined, then
    joined and in the order of the tokens.
    """
    t = load.tokens / layout.context
    s = t / layout.tensor if layout.sequence else t
    sent = s * shape.topk
    received = sent * load.routing_skew if layout.expert > 1 else sent
    at_experts = received * layout.expert_tensor
    rows = sent + (received if layout.expert > 1 else 0.0)
    # Else the rows that came are those that are saved, and only what goes back is new.
    rows += 2 * at_experts if shape.experts > layout.expert else sent
    return load.dtype_bytes * rows * shape.hidden


def layers_in_flight(shape: ModelShape, layout: Layout, micro_batches: int, stage: int) -> float:
    """Return the number of layers whose activations exist at once.

    These are the layers of one micro-batch times the micro-batches that the schedule runs ahead.
    """
    layers = layout.stage_layers(shape, stage)
    behind = layout.pipeline - stage - 1
    if layout.virtual_pipeline == 1:
        return layers * min(behind + 1, micro_batches)
    chunks = 2 * behind + (layout.virtual_pipeline - 1) * layout.pipeline + 1
    return layers / layout.virtual_pipeline * min(chunks, micro_batches * layout.virtual_pipeline)


def head_peak_bytes(shape: ModelShape, layout: Layout, load: Load) -> int:
    """Return what exists only while the head runs backward: logits in tiles, and gradients.

    Two tiles, the hidden states' gradient and a tile's columns of the weight's are fp32. If the
    model is not fp32, a third tile, what a product adds to them, and the finished gradients are in
    its dtype. [T, V] never exists.
    """
    b = load.dtype_bytes
    hidden = shape.hidden
    vocabulary = padded_vocab(shape, layout, load.vocab_multiple) // layout.tensor
    rows = max(1, round(_targets(layout, load)))
    width = max(isqrt(2 * load.chunk_elements), load.chunk_elements // rows, 1)
    width = min(width - (width % 128 if width > 128 else 0), vocabulary)
    height = max(1, min(load.chunk_elements // width, rows))
    total = 2 * 4 * height * width + b * vocabulary * hidden + 4 * hidden * (rows + width)
    return total + b * (height * width + hidden * (rows + max(height, width))) * (b < 4)


def _layer_bytes(
    shape: ModelShape, layout: Layout, load: Load, recompute: Recompute | None = None
) -> float:
    """Return the bytes of one layer and one pack.

    s: this rank's rows of the residual stream; t: its rows inside attention and MLP.
    """
    recompute = recompute or layout.recompute
    b = load.dtype_bytes
    t = load.tokens / layout.context
    s = t / layout.tensor if layout.sequence else t
    residual = b * s * shape.hidden
    if recompute == "full":
        return residual
    share = shape.moe_layers / max(shape.layers, 1)
    # The inputs of two norms, and 1 / rms.
    total = 2 * (residual + 4 * s + _normalised(s * shape.hidden, load))
    # The input of the QKV projection.
    total += residual
    total += _attention_bytes(shape, layout, load, t, again="core_attn" in recompute)
    # The input of the MLP.
    total += residual
    if "mlp" not in recompute:
        # The rows before and after SwiGLU.
        total += (1 - share) * b * t * 3 * shape.ffn / layout.tensor
    return total if "moe" in recompute else total + share * _experts_bytes(shape, layout, load, s)


def _attention_bytes(
    shape: ModelShape, layout: Layout, load: Load, t: float, *, again: bool
) -> float:
    b = load.dtype_bytes
    tp = layout.tensor
    d = shape.head_dim
    query = shape.heads * d / tp
    keys = shape.groups * d / tp
    # The projection; `value` is a view of it.
    total = b * t * (query + 2 * keys)
    if shape.heads > shape.groups > tp and (shape.qk_norm or again):
        # The queries of several groups are copied out of the projection.
        total += b * t * query
    if shape.qk_norm:
        total += 4 * t * (shape.heads + shape.groups) / tp + _normalised(t * (query + keys), load)
        # The outputs of the norms, which are rotated again.
        total += b * t * (query + keys) * again
    # The input of the output projection.
    total += b * t * query
    if again:
        return total
    total += b * t * (query + keys)  # rotated
    # Gathered keys and values of both chunks, and the joined parts of the output.
    if layout.context > 1:
        total += b * (load.tokens * (1 + 0.5 / layout.context) * 2 * keys - t * keys + t * query)
    total += 4 * t * shape.heads / tp  # log-sum-exp
    # Sine and cosine in the model's dtype, twice.
    return total + (2 * b * t * d if b < 4 else 0)


def _normalised(elements: float, load: Load) -> float:
    """Return what a composed norm keeps: normalised rows, and the input in fp32 instead of bf16."""
    return (8 - load.dtype_bytes) * elements * load.composed_norm


def _experts_bytes(shape: ModelShape, layout: Layout, load: Load, s: float) -> float:
    """Return the bytes of a layer's experts, with tokens evenly routed.

    Rows gathered by expert, before and after SwiGLU and weighted; router logits and
    probabilities.
    """
    b = load.dtype_bytes
    rows = s * shape.topk * layout.expert_tensor * load.routing_skew
    routed = (
        rows * (shape.hidden + 4 * shape.expert_ffn / layout.expert_tensor) + s * shape.hidden
    ) * b
    shared = (
        s * (layout.tensor if layout.sequence else 1) * 3 * shape.shared_ffn / layout.tensor * b
    )
    # The output that the gate multiplies.
    shared += s * shape.hidden * b * shape.shared_gate
    return routed + shared + s * shape.experts * (4 + 4 + 1)


def _rotary_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return the bytes of fp32 sine and cosine of a pack, shared by its layers."""
    return 4 * load.tokens / layout.context * shape.head_dim


def _head_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return the bytes of the last norm's input and output, and of three numbers a row."""
    t = load.tokens / layout.context
    rows = _targets(layout, load)
    s = t / layout.tensor if layout.sequence else t
    return (
        load.dtype_bytes * shape.hidden * (s + rows)
        + 4 * s
        + _normalised(s * shape.hidden, load)
        + 4 * 4 * rows
    )
