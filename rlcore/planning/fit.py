"""The memory that a layout needs on its fullest rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlcore.planning.activations import gather_buffer_bytes, scoring_bytes, training_bytes
from rlcore.planning.communicators import communicators, nccl_bytes
from rlcore.planning.job import Job, Trained
from rlcore.planning.memory import (
    Layout,
    Load,
    Weights,
    gradient_bytes,
    optimizer_bytes,
    rank_weights,
)
from rlcore.planning.shape import ModelShape

GIB = 1 << 30
# Share of a GPU for CUDA's context, workspaces of matmuls, and fragments of the allocator.
RESERVED = 0.08


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


def gib(num_bytes: float) -> str:
    """Format a number of bytes."""
    return f"{num_bytes / GIB:.1f} GiB"


def usable(capacity: int) -> int:
    """Return the part of a GPU's memory that tensors can use."""
    return round(capacity * (1 - RESERVED))


def needs(layout: Layout, job: Job) -> Needs:
    """Estimate the needs of the pipeline stage that needs most, with publications and NCCL."""
    load = job.load(layout)
    stages = (stage_needs(layout, load, job, stage) for stage in range(layout.pipeline))
    found = max(stages, key=lambda stage: stage.peak)
    phases = dict(found.phases)
    resident = dict(found.resident)
    if (published := job.publication) is not None:
        # Buffers stay, unless engines that share the GPUs get that memory. These hold their weights
        # at the same time, and read copies of two buckets.
        phases["publication"] = published.engine_bytes if published.colocated else 0
        if published.transport == "tensor":
            phases["publication"] += published.buffers(layout) + published.two_buckets
        else:
            resident["buckets of publications"] = published.buffers(layout)
    if groups := communicators(layout, job):
        resident[f"NCCL's buffers, {groups} communicators"] = nccl_bytes(layout, job)
    return Needs(found.stage, resident, phases)


def policy_weights(layout: Layout, job: Job) -> Weights:
    """Return the weights of the pipeline stage that holds most."""
    stages = (
        rank_weights(job.shape, layout, stage, vocab_multiple=job.vocab_multiple)
        for stage in range(layout.pipeline)
    )
    return max(stages, key=lambda weights: weights.total)


def kv_bytes_per_token(shape: ModelShape, tensor: int, *, dtype_bytes: int) -> float:
    """Return the bytes of K and V of a token on each of an engine's tensor-parallel ranks."""
    heads = shape.groups / min(tensor, shape.groups)
    return 2 * shape.layers * heads * shape.head_dim * dtype_bytes


def stage_needs(layout: Layout, load: Load, job: Job, stage: int) -> Needs:
    """Estimate the needs of one pipeline stage, without publications and NCCL."""
    resident: dict[str, int] = {}
    # A checkpoint, which needs all trained weights and optimizers at once, is a phase of its own.
    phases: dict[str, int] = {"checkpoint": 0}
    b = load.dtype_bytes
    shapes = [*(model.shape for model in job.trained), *(model.shape for model in job.frozen)]
    if gathers := max(gather_buffer_bytes(shape, layout, load) for shape in shapes):
        resident["gathers of sequence parallelism"] = gathers
    for model in job.trained:
        weights = model_weights(model, layout, load, stage)
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
    for other in job.frozen:
        size = (
            b * rank_weights(other.shape, layout, stage, vocab_multiple=load.vocab_multiple).total
        )
        phases[f"{other.name} pass"] = scoring_bytes(other.shape, layout, load, stage)
        if not other.offload:
            resident[f"{other.name} weights"] = size
        elif not other.swapped_in:
            phases[f"{other.name} pass"] += size
    return Needs(stage, resident, phases)


def model_weights(model: Trained, layout: Layout, load: Load, stage: int) -> Weights:
    """Return the parameters of a trained model on a rank of a stage."""
    return rank_weights(
        model.shape,
        layout,
        stage,
        vocab_multiple=load.vocab_multiple,
        value_head=model.value_head,
    )
