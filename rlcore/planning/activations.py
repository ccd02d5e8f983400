"""Bytes that a rank's passes hold besides the model's state: saved activations, layers, the head.

The tests in tests/parity compare the estimates with real tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, isqrt

from rlcore.planning.memory import Layout, Load, Recompute, padded_vocab_size
from rlcore.planning.shape import ModelShape

# Tokens of a chunk of recurrent layers.
CHUNK = 64
# The largest head of FlashAttention's kernels of variable lengths.
MAX_VARLEN_HEAD = 256


def training_bytes(
    shape: ModelShape,
    layout: Layout,
    load: Load,
    stage: int,
    *,
    lm_head: bool = True,
    transient: bool = True,
) -> int:
    """Return the most that forward and backward passes hold at once besides the model's state.

    Args:
        transient: count tensors that exist only inside a layer, the embedding or the head, besides
            those that the forward passes in flight save for the backward pass.
    """
    saved, backward = _of_chunks(shape, layout, load, stage, transient)
    if transient and stage == 0:
        # After the layers have run backward, the gradient of the embedding's weight exists whole in
        # the model's dtype before it is added to fp32's; the gradient of its output is gathered.
        rows = _vocabulary(shape, layout, load) + load.tokens / layout.context
        backward[0] = max(backward[0], load.dtype_bytes * shape.hidden * rows)
    if stage == layout.pipeline - 1:
        # The head is finished before the layers run backward, so its peak comes first.
        head = _head_bytes(shape, layout, load)
        peak = head_peak_bytes(shape, layout, load) if transient and lm_head else 0
        backward[-1] = max(backward[-1], saved[-1] + head + peak)
        # Multi-token prediction is finished before the head runs backward.
        predicted = _prediction_bytes(layout.of_stage(shape, stage), layout, load, transient)
        backward[-1] = max(backward[-1], saved[-1] + head + predicted)
    return round(
        max(
            sum(packs * size for packs, size in zip(in_flight, saved))
            + backward[chunk]
            - saved[chunk]
            for in_flight, chunk in _passes(layout, load.micro_batches, stage)
        )
    )


def scoring_bytes(
    shape: ModelShape, layout: Layout, load: Load, stage: int, *, adapted: bool = False
) -> int:
    """Return the most that a layer holds in a pass without gradients.

    Args:
        adapted: layers have adapters, whose products are added to theirs.
    """
    shape = layout.of_stage(shape, stage)
    t, s = _rows(layout, load)
    b = load.dtype_bytes
    residual = 3 * b * s * shape.hidden
    # The MLP's first product and SwiGLU, or SwiGLU and its second product.
    width = shape.ffn / layout.tensor
    rows = (2 + shape.gated) * width
    moments = [b * t * max(rows, width + shape.hidden) + residual]
    if adapted:
        # The first product, its adapter's, and what both are made of.
        moments.append(b * t * (rows + width + 2 * shape.hidden) + residual)
    if (layer := shape.recurrent) is not None:
        # The end of the rule, where its outputs are joined and sorted: in fp32.
        keys = layer.state / layer.values * layer.heads
        rule = 4 * (3 * keys + 4 * layer.values + CHUNK * layer.heads) + b * layer.values
        moments.append(t * (rule + b * 2 * layer.width) / layout.tensor + residual)
    if shape.moe_layers:
        rows = s * shape.topk * layout.expert_tensor * load.routing_skew
        experts = b * rows * shape.hidden + _experts_transient_bytes(shape, layout, load)
        moments.append(experts + residual)
    if stage == layout.pipeline - 1:
        # Hidden states gathered for the head, its rows, and the tiles.
        tiles = (8 + b * (b < 4)) * load.chunk_elements
        gathered = t * shape.hidden * layout.sequence
        moments.append(b * (gathered + _targets(layout, load) * shape.hidden) + tiles)
    return round(max(moments))


def _rows(layout: Layout, load: Load) -> tuple[float, float]:
    """Return a rank's rows of a pack: t inside attention and MLP, s in the residual stream."""
    t = load.tokens / layout.context
    return t, t / layout.tensor if layout.sequence else t


def _vocabulary(shape: ModelShape, layout: Layout, load: Load) -> int:
    return padded_vocab_size(shape.vocab, load.vocab_multiple, layout.tensor) // layout.tensor


def _targets(layout: Layout, load: Load) -> float:
    """Return the targets on the context-parallel rank that has most, at the end of a pack's tokens.

    Of the 2 x CP chunks a rank has one from the front and its counterpart from the back.
    """
    chunks = 2 * layout.context
    prompt = chunks * (1 - load.trainable / load.tokens)
    parts = [min(max(k + 1 - prompt, 0.0), 1.0) for k in range(chunks)]
    most = max(parts[k] + parts[chunks - 1 - k] for k in range(layout.context))
    return most * load.tokens / chunks


def _passes(layout: Layout, micro_batches: int, stage: int) -> Iterator[tuple[list[int], int]]:
    """Yield the number of packs held by each chunk, and the chunk that runs backward next.

    Interleaved chunks take turns for as many micro-batches as there are stages, forward from the
    first chunk and backward from the last; this repeats from the third turn on.
    """
    chunks = layout.virtual_pipeline
    ahead = _ahead(layout, stage)
    if chunks == 1:
        yield [min(ahead, micro_batches)], 0
        return
    turn = [chunk for chunk in range(chunks) for _ in range(layout.pipeline)]
    forward = turn * min(-(-micro_batches // layout.pipeline), 3)
    backward = [chunks - 1 - chunk for chunk in forward]
    for done, chunk in enumerate(backward):
        begun = forward[: ahead + done]
        yield [begun.count(k) - backward[:done].count(k) for k in range(chunks)], chunk


def _ahead(layout: Layout, stage: int) -> int:
    """Return how many forward passes a stage has begun when its first backward pass starts."""
    behind = layout.pipeline - stage - 1
    if layout.virtual_pipeline == 1:
        return behind + 1
    return 2 * behind + (layout.virtual_pipeline - 1) * layout.pipeline + 1


def micro_batches_in_flight(layout: Layout, micro_batches: int, stage: int) -> int:
    """Return the micro-batches that show a stage's peak: as many as its schedule runs ahead."""
    if layout.virtual_pipeline == 1:
        return min(_ahead(layout, stage), micro_batches)
    rounds = ceil(_ahead(layout, stage) / (layout.virtual_pipeline * layout.pipeline))
    return min(rounds * layout.pipeline, micro_batches)


def _of_chunks(
    shape: ModelShape, layout: Layout, load: Load, stage: int, transient: bool
) -> tuple[list[float], list[float]]:
    """Return what each chunk's layers keep of one pack, and the most that they hold backward."""
    # A rank's chunks share sine and cosine in fp32.
    rotary = 4 * load.tokens / layout.context * shape.head_dim / layout.virtual_pipeline
    saved = []
    backward = []
    for chunk in layout.chunks(shape, stage):
        total = most = rotary
        layers = chunk.layer_kinds()
        for indices, recompute in _runs(layout, chunk.layers):
            run = [layers[k] for k in indices]
            kept = [_layer_bytes(layer, layout, load, recompute) for layer in run]
            more = sum(_layer_bytes(layer, layout, load, "none") for layer in run)
            if recompute == "full":
                # The run keeps the input of its first layer; all its layers exist again at once.
                kept = kept[:1]
            else:
                more -= sum(kept)
            if transient:
                more += max(_transient_bytes(layer, layout, load) for layer in run)
            total += sum(kept)
            most = max(most, total + more)
        saved.append(total)
        backward.append(most)
    return saved, backward


def _runs(layout: Layout, layers: int) -> Iterator[tuple[range, Recompute]]:
    """Yield the layers of a chunk that run backward together, and what they recompute."""
    count = layout.recompute_layers
    is_uniform = layout.recompute == "full" and layout.recompute_method == "uniform"
    for begin in range(0, layers, count if is_uniform else 1):
        is_kept = layout.recompute == "full" and not is_uniform and begin >= count
        end = begin + count if is_uniform else begin + 1
        yield range(begin, end), "none" if is_kept else layout.recompute


def _transient_bytes(layer: ModelShape, layout: Layout, load: Load) -> float:
    """Return the peak of tensors that exist only inside a layer, besides what it saves."""
    if layer.moe_layers:
        return _experts_transient_bytes(layer, layout, load)
    if not layer.dense_layers:
        return 0.0
    t, s = _rows(layout, load)
    width = layer.ffn / layout.tensor
    # SwiGLU's backward pass computes the gradient of its input, which is twice as wide as its
    # output, and two products from the gradient of its output, which is freed by then. The layer's
    # residual stream is not freed, and its gradient exists twice.
    swiglu = 2 * (1 + layer.gated) * t * width + 2 * s * layer.hidden
    # In small packs the first product counts: the gradient of its weight is in the model's dtype
    # before it is added to fp32's, when SwiGLU's saved rows are freed but for its input's gradient.
    product = (1 + layer.gated) * width * layer.hidden + t * layer.hidden - t * width
    return load.dtype_bytes * max(swiglu, product)


def _experts_transient_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return what the forward pass of a layer of experts holds besides what it saves."""
    _, s = _rows(layout, load)
    sent = s * shape.topk
    received = sent * load.routing_skew if layout.expert > 1 else sent
    # The rows before and after the exchange live until the layer ends.
    rows = sent + (received if layout.expert > 1 else 0.0)
    # Of several experts on a rank, the rows are sorted and the outputs exist twice: one by one and
    # joined, then joined and in token order. Of one, only the returned rows are new.
    several = shape.experts > layout.expert
    rows += 2 * received * layout.expert_tensor if several else sent
    return load.dtype_bytes * rows * shape.hidden


def _prediction_bytes(shape: ModelShape, layout: Layout, load: Load, transient: bool) -> float:
    """Return the most that multi-token prediction holds, which is never recomputed as a whole."""
    layer = shape.prediction
    if layer is None:
        return 0.0
    b = load.dtype_bytes
    _, s = _rows(layout, load)
    rows = s * shape.hidden
    # The inputs of two norms, and 1 / rms; both together as the input of the projection.
    total = 2 * (b * rows + 4 * s + _normalised(rows, load)) + 2 * b * rows
    recompute = "none" if layout.recompute == "full" else layout.recompute
    total += _layer_bytes(layer, layout, load, recompute) + _head_bytes(shape, layout, load)
    # Where the last stage has no embedding, it gets the first one's.
    if layout.pipeline > 1 and not shape.tied:
        total += b * _vocabulary(shape, layout, load) * shape.hidden
    if not transient:
        return total
    # The weight of the head gets no gradient here.
    head = head_peak_bytes(shape, layout, load, trains_weight=False)
    again = _layer_bytes(layer, layout, load, "none") - _layer_bytes(layer, layout, load, recompute)
    return total + max(head, again + _transient_bytes(layer, layout, load))


def head_peak_bytes(
    shape: ModelShape, layout: Layout, load: Load, *, trains_weight: bool = True
) -> int:
    """Return what exists only while the head runs backward: tiles of logits, and gradients.

    Two tiles, the gradient of the hidden states and a tile's columns of the weight's gradient are
    fp32. If the model is not fp32, a third tile, the products added to these gradients, and the
    finished gradients are in the model's dtype. [T, V] never exists.
    """
    b = load.dtype_bytes
    hidden = shape.hidden
    vocabulary = _vocabulary(shape, layout, load)
    rows = max(1, round(_targets(layout, load)))
    width = max(isqrt(2 * load.chunk_elements), load.chunk_elements // rows, 1)
    width = min(width - (width % 128 if width > 128 else 0), vocabulary)
    height = max(1, min(load.chunk_elements // width, rows))
    total = 2 * 4 * height * width + 4 * hidden * rows
    total += b * (height * width + hidden * (rows + max(height, width))) * (b < 4)
    return total + (b * vocabulary * hidden + 4 * hidden * width) * trains_weight


def _layer_bytes(layer: ModelShape, layout: Layout, load: Load, recompute: Recompute) -> float:
    """Return the bytes that one layer keeps of one pack."""
    b = load.dtype_bytes
    t, s = _rows(layout, load)
    residual = b * s * layer.hidden
    if recompute == "full":
        return residual
    # The inputs of norms, and 1 / rms; the input of the QKV projection, and that of the MLP.
    norm = residual + 4 * s + _normalised(s * layer.hidden, load)
    total = layer.blocks * (norm * (1 + layer.sandwich) + residual)
    if layer.states:
        total += _recurrent_bytes(layer, layout, load, t, again="core_attn" in recompute)
    elif layer.attention_layers:
        total += _attention_bytes(layer, layout, load, t, again="core_attn" in recompute)
    if layer.moe_layers:
        total += _experts_bytes(layer, layout, load, s) * ("moe" not in recompute)
    elif layer.dense_layers and "mlp" not in recompute:
        # The rows before and after the activation.
        total += b * t * (2 + layer.gated) * layer.ffn / layout.tensor
    return total


def _attention_bytes(
    shape: ModelShape, layout: Layout, load: Load, t: float, *, again: bool
) -> float:
    b = load.dtype_bytes
    tp = layout.tensor
    d = shape.head_dim
    normed = shape.qk_norm or shape.norm_over_heads
    query = shape.heads * d / tp
    # A rank projects its part of a KV head and gathers the head.
    divided = shape.groups < tp
    keys = max(shape.groups, tp) * d / tp
    # On CUDA in fp32, and with heads too large for its kernel of variable lengths, keys and values
    # are copied to all query heads.
    copies_keys = (b == 4 or d > MAX_VARLEN_HEAD) and not load.composed_norm
    repeated = copies_keys and shape.heads > max(shape.groups, tp) and not again
    # The projection; `value` is a view of it, unless it is copied.
    projected = query + (2 - shape.keys_are_values) * shape.groups * d / tp
    total = b * t * projected * (normed or again or not (repeated or divided))
    # The gathered key and value share memory.
    total += b * t * 2 * keys * divided * (normed or not repeated)
    if shape.heads > shape.groups > tp and (normed or again):
        # The queries of several groups are copied out of the projection.
        total += b * t * query
    if normed:
        total += 4 * t * (query + keys) / d + _normalised(t * (query + keys), load)
        # The outputs of the norms, which are rotated again.
        total += b * t * (query + keys) * again
    if shape.normed_values:
        total += b * t * keys + 4 * t * keys / d
    # The input of the output projection.
    total += b * t * query
    if again:
        return total
    # The rotated queries.
    total += b * t * query
    width = query if repeated else keys
    # Gathered keys and values of both chunks, and the joined parts of the output.
    if layout.context > 1:
        total += b * (load.tokens * (1 + 0.5 / layout.context) * 2 * width + t * query)
    else:
        # Rotated keys, and copied values.
        total += b * t * width * (1 + repeated)
    # Log-sum-exp.
    total += 4 * t * shape.heads / tp
    # Sine and cosine in the model's dtype, twice.
    return total + (2 * b * t * d if b < 4 else 0)


def _recurrent_bytes(
    shape: ModelShape, layout: Layout, load: Load, t: float, *, again: bool
) -> float:
    """Return what a layer with a state keeps, if torch computes it in chunks."""
    layer = shape.recurrent
    assert layer is not None
    b = load.dtype_bytes
    convolved = layer.width - layer.values - (1 + layer.corrects) * layer.heads
    # The input of the output projection, and the projection: the gates are a view of it.
    total: float = b * (layer.values + layer.width)
    if not again:
        # The input of the convolution, and its output before and after silu; the norm's input.
        total += b * (3 * convolved + layer.values)
        keys = layer.state / layer.values
        values = layer.values / layer.heads
        if layer.corrects:
            # In fp32, in each head: four matrices of a chunk, queries, keys and corrections by
            # their decays, values, corrections with and without a state, and the state at the
            # chunk's start.
            of_head = 4 * CHUNK + 3 * keys + 3 * values
            # In each key head: queries and keys as they are and normalised, and two matrices.
            of_key_head = 2 * CHUNK + 4 * keys
        else:
            # Two matrices, queries and keys by their decays, values with and without time steps.
            of_head = 2 * CHUNK + 2 * keys + 2 * values
            # Queries and keys, and a matrix.
            of_key_head = CHUNK + 2 * keys
            # The values that pass the state by.
            total += b * layer.values
        key_heads = (convolved - layer.values) / (2 * keys)
        total += 4 * (layer.heads * of_head + key_heads * of_key_head + layer.state / CHUNK)
    return t * total / layout.tensor


def _normalised(elements: float, load: Load) -> float:
    """Return what a composed norm keeps: normalised rows, and the input in fp32, not bf16."""
    return (8 - load.dtype_bytes) * elements * load.composed_norm


def _experts_bytes(shape: ModelShape, layout: Layout, load: Load, s: float) -> float:
    """Return the bytes that a layer's experts keep, for evenly routed tokens."""
    b = load.dtype_bytes
    # The rows gathered by expert, before and after the activation, and weighted.
    rows = s * shape.topk * layout.expert_tensor * load.routing_skew
    width = shape.hidden + (3 + shape.gated) * shape.expert_ffn / layout.expert_tensor
    routed = (rows * width + s * shape.hidden) * b
    t = s * (layout.tensor if layout.sequence else 1)
    shared = t * (2 + shape.gated) * shape.shared_ffn / layout.tensor * b
    # The output that the gate multiplies.
    shared += s * shape.hidden * b * shape.shared_gate
    # The router's logits and probabilities.
    return routed + shared + s * shape.experts * (4 + 4 + 1)


def _head_bytes(shape: ModelShape, layout: Layout, load: Load) -> float:
    """Return the bytes of the last norm's input and output, and of three numbers a row."""
    _, s = _rows(layout, load)
    rows = _targets(layout, load)
    total = load.dtype_bytes * shape.hidden * (s + rows) + 4 * s
    return total + _normalised(s * shape.hidden, load) + 4 * 4 * rows
