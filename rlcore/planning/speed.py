"""An estimate of an optimizer step's time: arithmetic of the slowest stage, and communication.

docs/planning.md has the model. It assumes no overlap of communication and arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from math import ceil

from rlcore.planning.devices import GPUS_PER_NODE, Gpu
from rlcore.planning.job import Job
from rlcore.planning.memory import Layout, Weights, optimizer_bytes, rank_weights
from rlcore.planning.shape import ModelShape

ARITHMETIC = 0.5  # share of the peak that large bf16 matmuls and attention reach together
BANDWIDTH = 0.7  # share of a link's nominal bandwidth that collectives reach
HOST_BANDWIDTH = 25e9  # bytes/s between a GPU and pinned host memory, in one direction
TILE = (128, 256)  # rows and columns of a product that a multiprocessor computes at a time


@dataclass(frozen=True)
class StepTime:
    """The parts of an optimizer step's time, in seconds."""

    arithmetic: float
    communication: float
    bubble: float  # idle time of the pipeline

    @property
    def total(self) -> float:
        """The total time."""
        return sum(astuple(self))


def step_time(layout: Layout, job: Job, gpu: Gpu) -> StepTime:
    """Estimate the time of one optimizer step, with the scoring passes before it."""

    def seconds(sent: Iterable[tuple[float, int, int]]) -> float:
        """Return the time of rings that gather or scatter (bytes, ranks, span of GPUs)."""
        return sum(
            num_bytes * (ranks - 1) / ranks / (_bandwidth(gpu, span) * BANDWIDTH)
            for num_bytes, ranks, span in sent
        )

    arithmetic = _arithmetic(layout, job, gpu)
    in_layers = seconds(_sent_by_layers(layout, job))
    pp = layout.pipeline
    passes = job.micro_batches(layout) * layout.virtual_pipeline
    bubble = (arithmetic + in_layers) * (pp - 1) / passes
    weights = policy_weights(layout, job)
    copies = layout.data * layout.context
    # Replicas scatter gradients and gather weights, or sum gradients.
    gradient = 4 if job.trained[0].fp32_gradients else job.dtype_bytes
    each = gradient + job.dtype_bytes if layout.distributed else 2 * gradient
    dense = (each * weights.dense, copies, layout.tensor * copies)
    expert = (each * weights.expert, layout.expert_data, layout.gpus // pp)
    communication = in_layers + seconds([dense, expert])
    if pp > 1:
        # Each sweep sends hidden states, or their gradients, to the next stage.
        sent = _rows(layout, job) * job.shape.hidden * job.dtype_bytes
        sent *= (2 + job.scoring_passes) * layout.virtual_pipeline
        communication += sent / (_bandwidth(gpu, layout.gpus) * BANDWIDTH)
    policy = job.trained[0]
    if policy.offload or policy.offload_optimizer:
        state = optimizer_bytes(weights, layout, dtype_bytes=job.dtype_bytes)
        # In pieces, each brought, stepped and sent back.
        communication += 2 * state / HOST_BANDWIDTH
    return StepTime(arithmetic, communication, bubble)


def _sent_by_layers(layout: Layout, job: Job) -> Iterator[tuple[float, int, int]]:
    """Yield the exchanges of the largest stage's layers: bytes, ranks, and the span of GPUs."""
    shape = job.shape
    b = job.dtype_bytes
    tp = layout.tensor
    cp = layout.context
    tokens = job.tokens / layout.data / cp
    stages = range(layout.pipeline)
    layers = max(layout.stage_layers(shape, stage) for stage in stages)
    repeated = sum(here.layers for k in stages for here in layout.repeated(shape, k))
    # How many times the collectives of the layers run.
    sweeps = 2.0 + job.scoring_passes + repeated / shape.layers
    # Two all-reduces a layer and sweep, each a gather and a scatter; sequence parallelism gathers
    # once more in the backward pass.
    pairs = layers * shape.blocks / shape.layers / 2
    yield pairs * tokens * shape.hidden * b * (4 * sweeps + 2 * layout.sequence), tp, tp
    head = 2 * shape.head_dim * b
    attention = layers * shape.attention_layers / shape.layers
    if shape.groups < tp:
        # Each rank gathers keys and values of all heads, and takes one.
        yield attention * tokens * shape.groups * head * sweeps, tp, tp
    kv_heads = max(shape.groups, tp) / tp
    yield attention * tokens * cp * kv_heads * head * sweeps, cp, tp * cp
    if (recurrent := shape.recurrent) is not None:
        # All-to-all of what the rule reads, and of what it returns.
        states = layers * shape.states / shape.layers
        exchanged = states * tokens * recurrent.width / tp * b
        yield exchanged * sweeps, cp, tp * cp
    routed = _rows(layout, job) * shape.topk * shape.hidden * b
    routings = 2 * (sweeps + ("moe" in layout.recompute))
    moe_layers = layers * shape.moe_layers / shape.layers
    yield moe_layers * routed * routings, layout.expert, layout.expert_tensor * layout.expert


def policy_weights(layout: Layout, job: Job) -> Weights:
    """Return the trained weights of the pipeline stage that holds most."""
    policy = job.trained[0]
    stages: Iterable[Weights] = (
        policy.trained(layout, stage)
        if policy.adapters
        else rank_weights(job.shape, layout, stage, vocab_multiple=job.vocab_multiple)
        for stage in range(layout.pipeline)
    )
    return max(stages, key=lambda weights: weights.total)


def _rows(layout: Layout, job: Job) -> float:
    """Return the rows of the residual stream on one rank."""
    cut = layout.tensor if layout.sequence else 1
    return job.tokens / (layout.data * layout.context * cut)


def _arithmetic(layout: Layout, job: Job, gpu: Gpu) -> float:
    """Return the time of the slowest stage: a large one, or the last one with the LM head."""
    shape = job.shape
    head = 2.0 * job.sequences * job.trainable * shape.vocab * shape.hidden
    scoring = job.scoring_passes
    swept = 2.0 if job.trained[0].adapters else 3.0

    def of_stage(stage: int) -> float:
        here = layout.of_stage(shape, stage)
        whole = here.forward_flops([job.length], 0)
        again = job.repeated * here.forward_flops([job.prompt], 0)
        of_layers = (whole - again) * job.sequences
        # Without gradients of the weights a backward pass costs as much as a forward pass.
        of_layers *= swept + scoring + _recomputed(shape, layout, stage, job.length)
        of_layers /= fullness(here, layout, job.micro_tokens, gpu)
        predicted = here.prediction_flops([job.length], job.trainable) * job.sequences
        # A head recomputes its logits in the backward pass, whatever the layers recompute.
        heads = swept + 1.0 + scoring + shape.mtp
        return of_layers + predicted + head * heads * (stage == layout.pipeline - 1)

    slowest = max(map(of_stage, range(layout.pipeline)))
    return slowest * layout.pipeline / (layout.gpus * gpu.bf16_flops * ARITHMETIC)


def fullness(shape: ModelShape, layout: Layout, micro_tokens: int, gpu: Gpu) -> float:
    """Return the share of multiprocessors that the matmuls keep busy; small matmuls leave gaps."""
    total = 0.0
    time = 0.0
    for rows, width, flops in _products(shape, layout, micro_tokens):
        tiles = ceil(rows / TILE[0]) * ceil(width / TILE[1])
        waves = ceil(tiles / gpu.multiprocessors)
        total += flops
        time += flops / (rows * width / (waves * gpu.multiprocessors * TILE[0] * TILE[1]))
    return total / time


def _products(
    shape: ModelShape, layout: Layout, micro_tokens: int
) -> Iterator[tuple[float, float, float]]:
    """Yield (rows, columns of the result, weight entries) of a layer's matmuls on one rank.

    Each expert is a separate product.
    """
    t = micro_tokens / layout.context
    tp = layout.tensor
    dense = shape.dense_layers / shape.layers
    up = shape.matrices_of_mlp - 1
    attention = shape.attention_layers / shape.layers
    yield t, shape.qkv_width / tp, attention * shape.hidden * shape.qkv_width
    yield t, shape.hidden, attention * shape.hidden * shape.heads * shape.head_dim
    if (recurrent := shape.recurrent) is not None:
        states = shape.states / shape.layers
        yield t, recurrent.width / tp, states * shape.hidden * recurrent.width
        yield t, shape.hidden, states * shape.hidden * recurrent.values
    if dense:
        yield t, up * shape.ffn / tp, dense * up / (up + 1) * shape.mlp
        yield t, shape.hidden, dense * shape.mlp / (up + 1)
    if shape.experts:
        own = t / (tp if layout.sequence else 1)
        rows = own * shape.topk * layout.expert * layout.expert_tensor / shape.experts
        chosen = shape.moe_layers / shape.layers * shape.topk * shape.hidden * shape.expert_ffn
        yield rows, up * shape.expert_ffn / layout.expert_tensor, up * chosen
        yield rows, shape.hidden, chosen


def _bandwidth(gpu: Gpu, span: int) -> float:
    return gpu.node_bandwidth if span <= GPUS_PER_NODE else gpu.network_bandwidth


def _recomputed(shape: ModelShape, layout: Layout, stage: int, length: int) -> float:
    """Return the forward passes of a stage's layers that recomputation adds."""
    here = layout.of_stage(shape, stage)
    whole = here.forward_flops([length], 0)
    if layout.recompute == "full":
        chunks = layout.repeated(shape, stage)
        return sum(chunk.forward_flops([length], 0) for chunk in chunks) / whole
    attention = here.cost.attention(length) * ("core_attn" in layout.recompute)
    mlp = 2.0 * length * here.dense_layers * here.mlp * ("mlp" in layout.recompute)
    moe = 2.0 * length * here.moe_layers * here.chosen * ("moe" in layout.recompute)
    return (attention + mlp + moe) / whole
