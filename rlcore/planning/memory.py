"""Bytes of one rank's weights, gradients and optimizer, checked against tensors in tests/parity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rlcore.planning.shape import ModelShape

Recompute = Literal[
    "none", "core_attn", "mlp", "moe", "core_attn+mlp", "core_attn+moe", "mlp+moe",
    "core_attn+mlp+moe", "full",
]  # fmt: skip
# The state of an offloaded optimizer that a step has on the device at one time, in bytes.
OPTIMIZER_PIECE = 1 << 30
RecomputeMethod = Literal["uniform", "block"]


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
    # With "full": "uniform" recomputes runs of `recompute_layers` layers together, "block" only the
    # first `recompute_layers` layers of each chunk, one by one.
    recompute_method: RecomputeMethod = "uniform"
    recompute_layers: int = 1
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; empty: evenly divided

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_data(self) -> int:
        """The number of ranks that hold copies of the same experts."""
        return self.gpus // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def has_copies(self) -> bool:
        """Whether ranks hold copies of weights, over which an optimizer can be distributed."""
        return self.data * self.context > 1 or self.expert_data > 1

    def stage_layers(self, shape: ModelShape, stage: int) -> int:
        """Return the number of layers of a pipeline stage."""
        return self.stages[stage] if self.stages else shape.layers // self.pipeline

    def chunks(self, shape: ModelShape, stage: int) -> list[ModelShape]:
        """Return the shapes of a pipeline stage's VPP model chunks."""
        return [shape.of_layers(layers) for layers in self.layers_of(shape, stage)]

    def layers_of(self, shape: ModelShape, stage: int) -> list[range]:
        """Return the numbers of the layers of a pipeline stage's VPP model chunks."""
        each = [self.stage_layers(shape, k) // self.virtual_pipeline for k in range(self.pipeline)]
        first = sum(each[:stage])
        return [
            range(begin, begin + each[stage])
            for begin in range(first, first + self.virtual_pipeline * sum(each), sum(each))
        ]

    def of_stage(self, shape: ModelShape, stage: int) -> ModelShape:
        """Return the shape of all layers of a pipeline stage, over its chunks."""
        return shape.joined(self.chunks(shape, stage))

    def repeated(self, shape: ModelShape, stage: int) -> list[ModelShape]:
        """Return, for each chunk of a stage, the layers that full recomputation repeats."""
        chunks = self.chunks(shape, stage) if self.recompute == "full" else []
        if self.recompute_method == "uniform":
            return chunks
        return [here.of_layers(range(min(self.recompute_layers, here.layers))) for here in chunks]


@dataclass(frozen=True)
class Load:
    """The size of a micro-batch."""

    tokens: int  # slots of a pack, over all context-parallel ranks
    micro_batches: int  # per optimizer step
    trainable: int  # maximum number of the pack's tokens that are trained
    dtype_bytes: int = 2
    vocab_multiple: int = 1
    chunk_elements: int = 1 << 22
    # Whether norms are composed, as torch's RMSNorm on a CPU: they keep normalised rows in fp32.
    composed_norm: bool = False
    routing_skew: float = 1.0  # tokens of the rank's experts / an even share


@dataclass(frozen=True)
class AdapterSize:
    """The two factors of one adapted matrix."""

    layer: int
    whole: int  # parameters that every tensor-parallel rank holds
    divided: int  # parameters that tensor parallelism divides
    expert: bool = False


@dataclass(frozen=True)
class Weights:
    """The parameters of one rank: those copied by data parallelism, and the experts'."""

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

    A critic has a value head [H] on every tensor-parallel rank instead of an LM head.
    """
    here = layout.of_stage(shape, stage)
    weights = _layer_weights(here, layout)
    if here.prediction is not None:
        further = _layer_weights(here.prediction, layout)
        weights = Weights(
            weights.dense + further.dense + here.joint, weights.expert + further.expert
        )
    vocabulary = padded_vocab_size(shape.vocab, vocab_multiple, layout.tensor) * shape.hidden
    vocabulary //= layout.tensor
    first = stage == 0
    last = stage == layout.pipeline - 1
    dense = vocabulary * first + shape.hidden * last
    if value_head:
        dense += shape.hidden * last
    elif last and not (shape.tied and first):
        dense += vocabulary
    return Weights(weights.dense + dense, weights.expert)


def _layer_weights(here: ModelShape, layout: Layout) -> Weights:
    """Return a rank's parameters of these layers."""
    moe = here.moe_layers
    tp = layout.tensor
    dense = here.mixers / tp + here.norms
    dense += here.dense_layers * here.mlp / tp + moe * (here.shared / tp + here.router)
    return Weights(round(dense), round(moe * here.routed / (layout.expert * layout.expert_tensor)))


def rank_adapters(
    adapters: Iterable[AdapterSize], shape: ModelShape, layout: Layout, stage: int
) -> Weights:
    """Return the adapters' parameters of a rank of pipeline stage `stage`."""
    layers = {layer for chunk in layout.layers_of(shape, stage) for layer in chunk}
    dense = 0.0
    expert = 0.0
    for one in adapters:
        if one.layer not in layers:
            continue
        if one.expert:
            expert += (one.whole + one.divided / layout.expert_tensor) / layout.expert
        else:
            dense += one.whole + one.divided / layout.tensor
    return Weights(round(dense), round(expert))


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Return the next multiple of `divisible_by` x TP, so that all ranks have equally many rows."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def gradient_bytes(weights: Weights, each: int = 4) -> int:
    """Return the bytes of the gradient buffers, which have `each` bytes a weight."""
    return each * weights.total


def optimizer_bytes(weights: Weights, layout: Layout, *, dtype_bytes: int) -> int:
    """Return the bytes of two fp32 moments, and of fp32 weights next to bf16 ones.

    A distributed optimizer divides them among the ranks that hold copies. A step needs no further
    memory: AdamW is one kernel on CUDA.
    """
    each = 8 + (4 if dtype_bytes < 4 else 0)
    if not layout.distributed:
        return each * weights.total
    dense = weights.dense / (layout.data * layout.context)
    return round(each * (dense + weights.expert / layout.expert_data))


def piece_bytes(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    *,
    vocab_multiple: int = 1,
    value_head: bool = False,
    dtype_bytes: int,
) -> int:
    """Return the most that an offloaded optimizer has on the device: it comes back in pieces.

    No piece is smaller than the state of one matrix: a distributed optimizer divides a buffer of
    all weights, which may leave a matrix whole.
    """
    rows = (1 + shape.gated) * shape.ffn // layout.tensor
    if stage == 0 or (stage == layout.pipeline - 1 and not value_head):
        vocabulary = padded_vocab_size(shape.vocab, vocab_multiple, layout.tensor)
        rows = max(rows, vocabulary // layout.tensor)
    each = 8 + (4 if dtype_bytes < 4 else 0)
    return max(OPTIMIZER_PIECE, each * rows * shape.hidden)
