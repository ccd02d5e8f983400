"""An estimate of an optimizer step's time: arithmetic of the slowest stage, and communication.

docs/planning.md has the model. Communication is taken as not overlapped with arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from math import ceil

from rlcore.planning.devices import GPUS_PER_NODE, Gpu
from rlcore.planning.memory import Layout, Weights
from rlcore.planning.shape import ModelShape

ARITHMETIC = 0.5  # share of the peak that large bf16 matmuls and attention reach together
BANDWIDTH = 0.7  # share of a link's figure that collectives reach
TILE = (128, 256)  # rows and columns of a product that a multiprocessor computes at a time


@dataclass(frozen=True)
class Work:
    """The work of one optimizer step."""

    sequences: int
    length: int  # tokens of each
    trainable: int  # of those
    scoring_passes: int  # forward passes without gradients: reference, old log-probs
    micro_batches: int  # on each replica
    micro_tokens: int  # of each, over all context-parallel ranks
    dtype_bytes: int = 2
    repeated: float = 0.0  # share of sequences whose prompt stands in their pack already

    @property
    def prompt(self) -> int:
        """The tokens of a sequence that may be another's too."""
        return self.length - self.trainable

    @property
    def tokens(self) -> float:
        """All tokens of the step that are computed."""
        return self.sequences * (self.length - self.repeated * self.prompt)


@dataclass(frozen=True)
class StepTime:
    """The parts of an optimizer step's time, in seconds."""

    arithmetic: float
    tensor: float
    context: float
    expert: float
    data: float
    pipeline: float  # the bubble, and what stages send

    @property
    def total(self) -> float:
        """The whole time."""
        return sum(astuple(self))


def step_time(
    shape: ModelShape, layout: Layout, work: Work, weights: Weights, gpu: Gpu
) -> StepTime:
    """Estimate the time of one optimizer step, with the scoring passes before it.

    Args:
        weights: those of the fullest rank.
    """
    arithmetic = _arithmetic(shape, layout, work, gpu)

    # Of one rank: the tokens of its replica, cut by CP, and the layers of the largest stage.
    tokens = work.tokens / layout.data / layout.context
    layers = _most_layers(shape, layout)
    b = work.dtype_bytes
    # How many times the collectives of the layers run.
    sweeps = 2.0 + work.scoring_passes + _repeated(shape, layout)
    routings = sweeps + ("moe" in layout.recompute)

    def seconds(num_bytes: float, ranks: int, span: int) -> float:
        """Time a ring that gathers or scatters `num_bytes` over `ranks` in a span of GPUs."""
        return num_bytes * (ranks - 1) / ranks / (_bandwidth(gpu, span) * BANDWIDTH)

    tp = layout.tensor
    cp = layout.context
    ep = layout.expert
    pp = layout.pipeline
    # Two all-reduces a layer and sweep, each a gather and a scatter; sequence parallelism gathers
    # once more in the backward pass.
    tensor = seconds(
        layers * tokens * shape.hidden * b * (4 * sweeps + 2 * layout.sequence), tp, tp
    )
    kv = 2 * shape.groups * shape.head_dim / tp
    context = seconds(layers * tokens * cp * kv * b * sweeps, cp, tp * cp)
    moe = layers * shape.moe_layers / shape.layers
    own_rows = tokens / (tp if layout.sequence else 1)
    expert = seconds(
        moe * own_rows * shape.topk * shape.hidden * b * 2 * routings, ep, layout.expert_tensor * ep
    )
    copies = layout.data * cp
    data = seconds((4 + b if layout.distributed else 8) * weights.dense, copies, tp * copies)
    data += seconds(
        (4 + b if layout.distributed else 8) * weights.expert, layout.expert_data, layout.gpus // pp
    )
    busy = arithmetic + tensor + context + expert
    pipeline = busy * (pp - 1) / (work.micro_batches * layout.virtual_pipeline)
    if pp > 1:  # each sweep passes hidden states, or their gradients, on to the next stage
        sent = own_rows * shape.hidden * b * (2 + work.scoring_passes) * layout.virtual_pipeline
        pipeline += sent / (_bandwidth(gpu, layout.gpus) * BANDWIDTH)
    return StepTime(arithmetic, tensor, context, expert, data, pipeline)


def rank_flops(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    lengths: Sequence[int],
    trainable: int,
    *,
    training: bool,
    shared: Sequence[int] = (),
) -> float:
    """Count the FLOPs of one rank of a stage for some sequences of its replica.

    Args:
        shared: lengths of the prefixes that are computed for another sequence already.
        training: count the backward pass and what it computes again.
    """
    here = layout.of_stage(shape, stage)
    of_layers = here.forward_flops(lengths, 0) - here.forward_flops(shared, 0)
    head = 2.0 * trainable * shape.vocab * shape.hidden * (stage == layout.pipeline - 1)
    if training:
        of_layers *= 3.0 + _again(shape, layout, stage, max(lengths))
        head *= 4.0
    return (of_layers + head) / (layout.tensor * layout.context)


def _arithmetic(shape: ModelShape, layout: Layout, work: Work, gpu: Gpu) -> float:
    """Time the stage that computes longest: a large one, or the last, which has the LM head too.

    The head recomputes its logits in the backward pass, whatever the layers recompute.
    """
    head = 2.0 * work.sequences * work.trainable * shape.vocab * shape.hidden
    scoring = work.scoring_passes

    def of_stage(stage: int) -> float:
        here = layout.of_stage(shape, stage)
        whole = here.forward_flops([work.length], 0)
        again = work.repeated * here.forward_flops([work.prompt], 0)
        of_layers = (whole - again) * work.sequences
        of_layers *= 3.0 + scoring + _again(shape, layout, stage, work.length)
        of_layers /= fullness(here, layout, work.micro_tokens, gpu)
        return of_layers + head * (4.0 + scoring) * (stage == layout.pipeline - 1)

    slowest = max(map(of_stage, range(layout.pipeline)))
    return slowest * layout.pipeline / (layout.gpus * gpu.bf16_flops * ARITHMETIC)


def fullness(shape: ModelShape, layout: Layout, micro_tokens: int, gpu: Gpu) -> float:
    """Return the share of multiprocessors that the matmuls keep busy: small ones leave gaps."""
    products = list(_products(shape, layout, micro_tokens))
    return sum(flops for _, _, flops in products) / sum(
        flops / _wave_share(rows, width, gpu) for rows, width, flops in products
    )


def _products(
    shape: ModelShape, layout: Layout, micro_tokens: int
) -> Iterator[tuple[float, float, float]]:
    """Yield (rows, columns of the result, weight entries) of a layer's matmuls on one rank.

    Each expert is a product of its own.
    """
    t = micro_tokens / layout.context
    tp = layout.tensor
    dense = 1 - shape.moe_layers / shape.layers
    yield t, shape.qkv_width / tp, shape.hidden * shape.qkv_width
    yield t, shape.hidden, shape.hidden * shape.heads * shape.head_dim
    if dense:
        yield t, 2 * shape.ffn / tp, dense * 2 / 3 * shape.mlp
        yield t, shape.hidden, dense * shape.mlp / 3
    if shape.experts:
        own = t / (tp if layout.sequence else 1)
        rows = own * shape.topk * layout.expert * layout.expert_tensor / shape.experts
        chosen = (1 - dense) * shape.topk * shape.hidden * shape.expert_ffn
        yield rows, 2 * shape.expert_ffn / layout.expert_tensor, 2 * chosen
        yield rows, shape.hidden, chosen


def _wave_share(rows: float, width: float, gpu: Gpu) -> float:
    tiles = ceil(rows / TILE[0]) * ceil(width / TILE[1])
    waves = ceil(tiles / gpu.multiprocessors)
    return rows * width / (waves * gpu.multiprocessors * TILE[0] * TILE[1])


def _most_layers(shape: ModelShape, layout: Layout) -> int:
    return max(layout.stage_layers(shape, k) for k in range(layout.pipeline))


def _bandwidth(gpu: Gpu, span: int) -> float:
    return gpu.node_bandwidth if span <= GPUS_PER_NODE else gpu.network_bandwidth


def _repeated(shape: ModelShape, layout: Layout) -> float:
    """Return the share of the layers that full recomputation computes again, all of a layer."""
    stages = range(layout.pipeline)
    return sum(here.layers for k in stages for here in layout.repeated(shape, k)) / shape.layers


def _again(shape: ModelShape, layout: Layout, stage: int, length: int) -> float:
    """Return the forward passes of a stage's layers that recomputation adds."""
    here = layout.of_stage(shape, stage)
    whole = here.forward_flops([length], 0)
    if layout.recompute == "full":
        chunks = layout.repeated(shape, stage)
        return sum(chunk.forward_flops([length], 0) for chunk in chunks) / whole
    attention = here.cost.quadratic * length**2 * ("core_attn" in layout.recompute)
    mlp = 2.0 * length * (here.layers - here.moe_layers) * here.mlp * ("mlp" in layout.recompute)
    moe = 2.0 * length * here.moe_layers * here.chosen * ("moe" in layout.recompute)
    return (attention + mlp + moe) / whole
