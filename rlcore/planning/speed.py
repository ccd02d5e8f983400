"""An estimate of one optimizer step's time: arithmetic, what tensor, context, expert and data parallelism send, the bubble.

docs/planning.md writes the model down. Communication is taken as not overlapped with arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.planning.devices import Gpu
from rlcore.planning.memory import Layout, Weights
from rlcore.planning.shape import ModelShape

GPUS_PER_NODE = 8
ARITHMETIC = 0.5            # share of the peak that large bf16 matmuls and attention reach together
BANDWIDTH = 0.7             # share of a link's figure that collectives reach


@dataclass(frozen=True)
class Work:
    """What one optimizer step does."""

    sequences: int
    length: int             # tokens of each
    scoring_passes: int     # forward passes without gradients: reference, old log-probs
    micro_batches: int      # on each replica
    dtype_bytes: int = 2

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    arithmetic: float
    tensor: float
    context: float
    expert: float
    data: float
    bubble: float

    @property
    def total(self) -> float:
        return self.arithmetic + self.tensor + self.context + self.expert + self.data + self.bubble


def step_time(shape: ModelShape, layout: Layout, work: Work, weights: Weights, gpu: Gpu) -> StepTime:
    """Of one optimizer step, scoring passes before it included. `weights` are those of the fullest rank."""
    forward = work.sequences * shape.cost(work.length)
    passes = 3.0 + work.scoring_passes + _again(shape, layout, work)
    arithmetic = forward * passes / (layout.gpus * gpu.bf16_flops * ARITHMETIC)

    # Of this rank: its replica's tokens, cut by CP, through its stage's layers.
    tokens = work.tokens / layout.data / layout.context
    layers, b = shape.layers / layout.pipeline, work.dtype_bytes
    sweeps = 2.0 + work.scoring_passes + (layout.recompute == "full")      # times that the layers' collectives run

    def seconds(num_bytes: float, ranks: int, span: int) -> float:
        """A ring that gathers or scatters `num_bytes` over `ranks` which lie in a span of so many GPUs."""
        bandwidth = gpu.node_bandwidth if span <= GPUS_PER_NODE else gpu.network_bandwidth
        return num_bytes * (ranks - 1) / ranks / (bandwidth * BANDWIDTH)

    tp, cp, ep = layout.tensor, layout.context, layout.expert
    # Two all-reduces a layer and sweep, each a gather and a scatter; sequence parallelism gathers once more going backward.
    tensor = seconds(layers * tokens * shape.hidden * b * (4 * sweeps + 2 * layout.sequence), tp, tp)
    kv = 2 * shape.groups * shape.head_dim / tp
    context = seconds(layers * tokens * cp * kv * b * sweeps, cp, tp * cp)
    moe = layers * shape.moe_layers / shape.layers
    routed = tokens / (tp if layout.sequence else 1) * shape.topk * shape.hidden * b
    expert = seconds(moe * routed * 2 * sweeps, ep, layout.expert_tensor * ep)
    copies = layout.data * layout.context
    data = seconds((4 + b if layout.distributed else 8) * weights.dense, copies, tp * copies)
    data += seconds((4 + b if layout.distributed else 8) * weights.expert, layout.expert_data, layout.gpus // layout.pipeline)
    busy = arithmetic + tensor + context + expert
    bubble = busy * (layout.pipeline - 1) / (work.micro_batches * layout.virtual_pipeline)
    return StepTime(arithmetic, tensor, context, expert, data, bubble)


def _again(shape: ModelShape, layout: Layout, work: Work) -> float:
    """Forward passes that recomputation adds."""
    if layout.recompute == "full":
        return 1.0
    whole = shape.cost(work.length)
    attention = shape.cost.quadratic * work.length**2 * ("core_attn" in layout.recompute)
    mlp = 2.0 * work.length * (shape.layers - shape.moe_layers) * shape.mlp * ("mlp" in layout.recompute)
    return (attention + mlp) / whole
