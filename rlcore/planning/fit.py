"""The memory that a layout needs on its fullest rank, and whether that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlcore.planning.activations import gather_buffer_bytes, scoring_bytes, training_bytes
from rlcore.planning.memory import (
    Layout,
    Load,
    Weights,
    gradient_bytes,
    optimizer_bytes,
    rank_weights,
)
from rlcore.planning.publication import Publication
from rlcore.planning.shape import ModelShape

GIB = 1 << 30
# Share of a GPU for CUDA's context, workspaces of matmuls, and fragments of the allocator.
RESERVED = 0.08


@dataclass(frozen=True)
class Trained:
    """A model with gradients and an optimizer, laid out like the policy."""

    name: str
    shape: ModelShape
    value_head: bool = False
    offload: bool = False  # the model between its passes, and its optimizer
    offload_optimizer: bool = False
    distributed: bool | None = None  # its optimizer, where that is not laid out as the policy's


@dataclass(frozen=True)
class Frozen:
    """A model that is only scored.

    Offloaded it takes room in its passes alone; with `swapped_in` it takes the policy's.
    """

    name: str
    shape: ModelShape
    offload: bool = False
    swapped_in: bool = False


@dataclass(frozen=True)
class Needs:
    """The bytes on one rank: parts that stay for the whole step, and what each phase adds."""

    stage: int
    resident: dict[str, int]
    phases: dict[str, int]

    @property
    def peak(self) -> int:
        """The most that the rank ever needs."""
        return sum(self.resident.values()) + max(self.phases.values())

    @property
    def largest_phase(self) -> str:
        """The phase that adds most."""
        return max(self.phases, key=self.phases.__getitem__)


def needs(
    layout: Layout,
    load: Load,
    trained: tuple[Trained, ...],
    frozen: tuple[Frozen, ...],
    publication: Publication | None = None,
) -> Needs:
    """Estimate the needs of the pipeline stage that needs most."""

    def of_stage(stage: int) -> Needs:
        found = stage_needs(layout, load, trained, frozen, stage)
        return found if publication is None else _publishing(found, publication, layout)

    return max(map(of_stage, range(layout.pipeline)), key=lambda n: n.peak)


def _publishing(found: Needs, publication: Publication, layout: Layout) -> Needs:
    """Add the buffers of publications.

    They stay, but engines that share the GPUs get that memory; these read copies of two buckets
    and hold their weights at the same time.
    """
    buffers = publication.buffers(layout, rank0=found.stage == 0)
    engine = publication.engine_bytes if publication.colocated else 0
    if publication.transport == "tensor":
        copies = publication.two_buckets
        return replace(found, phases=found.phases | {"publication": buffers + copies + engine})
    resident = found.resident | {"buckets of publications": buffers}
    return replace(found, resident=resident, phases=found.phases | {"publication": engine})


def policy_weights(layout: Layout, shape: ModelShape, load: Load) -> Weights:
    """Return the weights of the pipeline stage that holds most."""
    stages = (
        rank_weights(shape, layout, k, vocab_multiple=load.vocab_multiple)
        for k in range(layout.pipeline)
    )
    return max(stages, key=lambda weights: weights.total)


def kv_bytes_per_token(shape: ModelShape, tensor: int, *, dtype_bytes: int) -> float:
    """Return the bytes of K and V of a token on each of an engine's tensor-parallel ranks."""
    heads = shape.groups / min(tensor, shape.groups)
    return 2 * shape.layers * heads * shape.head_dim * dtype_bytes


def stage_needs(
    layout: Layout, load: Load, trained: tuple[Trained, ...], frozen: tuple[Frozen, ...], stage: int
) -> Needs:
    """Estimate the needs of one pipeline stage."""
    resident: dict[str, int] = {}
    # A checkpoint, which needs all trained weights and optimizers at once, is a phase of its own.
    phases: dict[str, int] = {"checkpoint": 0}
    b = load.dtype_bytes
    shapes = [*(model.shape for model in trained), *(model.shape for model in frozen)]
    if gathers := max(gather_buffer_bytes(shape, layout, load) for shape in shapes):
        resident["gathers of sequence parallelism"] = gathers
    for model in trained:
        weights = rank_weights(
            model.shape,
            layout,
            stage,
            vocab_multiple=load.vocab_multiple,
            value_head=model.value_head,
        )
        own = b * weights.total + gradient_bytes(weights)
        own_layout = layout
        if model.distributed is not None:
            own_layout = replace(layout, distributed=model.distributed)
        state = optimizer_bytes(weights, own_layout, dtype_bytes=b)
        activations = training_bytes(model.shape, layout, load, stage, lm_head=not model.value_head)
        away = own if model.offload else 0
        if not model.offload:
            resident[f"{model.name} weights"] = b * weights.total
            resident[f"{model.name} gradients"] = gradient_bytes(weights)
        if not (model.offload or model.offload_optimizer):
            resident[f"{model.name} optimizer"] = state
        scored = b * weights.total if model.offload else 0
        stepping = state if model.offload or model.offload_optimizer else 0
        phases["checkpoint"] += scored + stepping
        phases[f"{model.name} pass"] = scored + scoring_bytes(model.shape, layout, load, stage)
        phases[f"{model.name} forward and backward"] = away + activations
        phases[f"{model.name} optimizer step"] = away + stepping
    for other in frozen:
        size = (
            b * rank_weights(other.shape, layout, stage, vocab_multiple=load.vocab_multiple).total
        )
        phases[f"{other.name} pass"] = scoring_bytes(other.shape, layout, load, stage)
        if not other.offload:
            resident[f"{other.name} weights"] = size
        elif not other.swapped_in:
            phases[f"{other.name} pass"] += size
    return Needs(stage, resident, phases)
