"""The memory that a layout needs on its fullest rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from rlcore.planning.activations import scoring_bytes, training_bytes
from rlcore.planning.devices import GPUS_PER_NODE, Gpu
from rlcore.planning.job import Frozen, Job, Trained
from rlcore.planning.memory import (
    Layout,
    Load,
    Recompute,
    Weights,
    gradient_bytes,
    optimizer_bytes,
    piece_bytes,
    rank_adapters,
    rank_weights,
)
from rlcore.planning.speed import StepTime, step_time

GIB = 1 << 30
# Share of a GPU for the CUDA context, matmul workspaces, and fragments of the allocator.
RESERVED = 0.08


@dataclass(frozen=True)
class Needs:
    """The bytes on one rank: parts that stay for the whole step, and additions of each phase."""

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
    """Format a number of bytes in GiB."""
    return f"{num_bytes / GIB:.1f} GiB"


def usable(capacity: int) -> int:
    """Return the part of a GPU's memory that tensors can use."""
    return round(capacity * (1 - RESERVED))


def needs(layout: Layout, job: Job) -> Needs:
    """Estimate the needs of the fullest pipeline stage, including publications and NCCL."""
    load = job.load(layout)
    stages = (stage_needs(layout, load, job, stage) for stage in range(layout.pipeline))
    return max(
        (_with_publications(found, layout, job) for found in stages), key=lambda stage: stage.peak
    )


def _with_publications(found: Needs, layout: Layout, job: Job) -> Needs:
    """Add publications, NCCL and a sleeping engine to the needs of a stage."""
    phases = dict(found.phases)
    resident = {**found.resident, **outside_bytes(layout, job, found.stage)}
    if (published := job.publication) is not None:
        # Buffers stay, unless colocated engines get their memory. Such engines hold their weights
        # at the same time, and read copies of two buckets.
        phases["publication"] = published.engine_bytes if published.colocated else 0
        if published.transport == "tensor":
            phases["publication"] += published.buffers(layout) + published.two_buckets
        else:
            resident["buckets of publications"] = published.buffers(layout)
    return Needs(found.stage, resident, phases)


def stage_needs(layout: Layout, load: Load, job: Job, stage: int) -> Needs:
    """Estimate the needs of one pipeline stage, without publications and NCCL."""
    resident: dict[str, int] = {}
    # A checkpoint needs all trained weights at once, so it is a phase of its own.
    phases: dict[str, int] = {"checkpoint": 0}
    b = load.dtype_bytes
    if layout.sequence and layout.tensor > 1:
        # Megatron keeps a buffer for the gathers, which all layers use in turn.
        models: list[Trained | Frozen] = [*job.trained, *job.frozen]
        width = max(model.shape.hidden for model in models)
        resident["gathers of sequence parallelism"] = round(
            b * load.tokens / layout.context * width
        )
    for model in job.trained:
        weights = whole = model_weights(model, layout, load, stage)
        trained = model.trained(layout, stage) if model.adapters else weights
        if model.shares_base:
            weights = trained
        gradients = gradient_bytes(trained, 4 if model.fp32_gradients else b)
        own = b * weights.total + gradients
        distributed = layout.distributed if model.distributed is None else model.distributed
        state = optimizer_bytes(trained, replace(layout, distributed=distributed), dtype_bytes=b)
        activations = training_bytes(model.shape, layout, load, stage, lm_head=not model.value_head)
        away = own if model.offload else 0
        if not model.offload:
            resident[f"{model.name} weights"] = b * weights.total
            resident[f"{model.name} gradients"] = gradients
        scored = b * weights.total if model.offload else 0
        phases["checkpoint"] += scored
        if model.offload or model.offload_optimizer:
            piece = piece_bytes(
                model.shape, layout, stage, vocab_multiple=load.vocab_multiple,
                value_head=model.value_head, dtype_bytes=b,
            )  # fmt: skip
            stepping = min(state, piece)
            if b < 4 and not model.fp32_gradients:
                # Those of a piece are converted, to 4 bytes next to 12 of the state.
                stepping += stepping // 3
            there = 0
        else:
            there = resident[f"{model.name} optimizer"] = state
            stepping = 0
        # Before the state exists, Megatron copies the weights into the buffers of a distributed
        # optimizer, one by one.
        copied = b * max(trained.dense, trained.expert) if distributed else 0
        phases[f"{model.name} start"] = away + max(copied - there, 0)
        if model.shares_base:
            # It is built with weights of its own, which it then gives up.
            phases[f"{model.name} start"] = b * whole.total
        adapted = bool(model.adapters)
        scoring = scoring_bytes(model.shape, layout, load, stage, adapted=adapted)
        phases[f"{model.name} pass"] = scored + scoring
        phases[f"{model.name} forward and backward"] = away + activations
        phases[f"{model.name} optimizer step"] = away + stepping
    for other in job.frozen:
        size = b * model_weights(Trained("", other.shape), layout, load, stage).total
        adapted = other.swapped_in and bool(job.trained[0].adapters)
        scoring = scoring_bytes(other.shape, layout, load, stage, adapted=adapted)
        phases[f"{other.name} pass"] = scoring
        if not other.offload:
            resident[f"{other.name} weights"] = size
        elif not other.swapped_in:
            phases[f"{other.name} pass"] += size
    return Needs(stage, resident, phases)


def model_weights(model: Trained, layout: Layout, load: Load, stage: int) -> Weights:
    """Return the parameters of a trained model on a rank of a stage, its adapters included."""
    multiple = load.vocab_multiple
    base = rank_weights(
        model.shape, layout, stage, vocab_multiple=multiple, value_head=model.value_head
    )
    added = rank_adapters(model.adapters, model.shape, layout, stage)
    return Weights(base.dense + added.dense, base.expert + added.expert)


# --- NCCL -----------------------------------------------------------------------------------------

# Public measurements on eight H100 under TP 2 x PP 2 x DP 2: suspending idle communicators freed
# 7 GB a rank for a dense model, 9.5 GB for one with experts (verl-project/verl, pull request 6408),
# which have five and eight groups here. torch makes a communicator at a group's first call, so
# unused groups and groups of one rank cost nothing.
TRAINING_GROUP = round(1.2 * GIB)
# A publication only broadcasts: one ring on each of 16 channels, whose buffers for three protocols
# have 10 MiB together (NCCL 2.27, src/init.cc, computeBuffSizes).
PUBLICATION_GROUP = 160 << 20
# CUDA's context, NCCL and the allocator's rest of an engine that has released its memory.
SLEEPING_ENGINE = 2 * GIB


def publication_groups(layout: Layout, job: Job) -> int:
    """Return how many groups of a publication the busiest rank joins."""
    if job.publication is None:
        return 0
    exchanges_parts = layout.tensor * layout.pipeline * layout.expert > 1
    broadcasts = job.publication.is_everywhere(layout) and layout.gpus > 1
    return exchanges_parts + broadcasts + job.publication.engines_of_a_sender(layout)


def outside_bytes(layout: Layout, job: Job, stage: int = 0) -> dict[str, int]:
    """Return what the GPU of a rank of a stage holds besides the trainer's tensors, by name."""
    shape = job.shape
    linked = (shape.tied or shape.mtp) and stage in (0, layout.pipeline - 1)
    training = len(training_groups(layout, moe=shape.experts > 0, linked=linked))
    publishing = publication_groups(layout, job)
    nccl = training * TRAINING_GROUP + publishing * PUBLICATION_GROUP
    found = {f"NCCL's buffers, {training + publishing} communicators": nccl} if nccl else {}
    if job.publication is not None and job.publication.colocated:
        found["a sleeping engine"] = SLEEPING_ENGINE
    return found


def training_groups(layout: Layout, *, moe: bool, linked: bool) -> dict[str, int]:
    """Return the sizes of the groups that a rank joins for a training step, by name.

    Args:
        linked: the rank's stage, the first or last one, exchanges embeddings with the other, which
            are tied to the head or read by multi-token prediction.
    """
    experts = layout.expert * layout.expert_tensor
    sizes = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "data and context": layout.data * layout.context,
        "embeddings": 2 if linked and layout.pipeline > 1 else 1,
    }
    if moe:
        sizes["expert"] = layout.expert
        sizes["expert tensor"] = layout.expert_tensor
        sizes["expert and its tensor"] = experts
        sizes["expert data"] = layout.expert_data
    # The group for the norm of the gradient.
    if layout.distributed:
        sizes["whole optimizer"] = layout.gpus
    else:
        sizes["model"] = layout.tensor * layout.pipeline
        sizes["model with experts"] = experts * layout.pipeline if moe else 1
    return {name: size for name, size in sizes.items() if size > 1}


# --- search ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One layout with its needs and its time."""

    layout: Layout
    needs: Needs
    time: StepTime

    def fits(self, capacity: int) -> bool:
        """Whether it fits on GPUs of `capacity` bytes."""
        return self.needs.peak <= usable(capacity)


def judge(layout: Layout, job: Job, gpu: Gpu) -> Option:
    """Estimate the needs and the time of a layout."""
    return Option(layout, needs(layout, job), step_time(layout, job, gpu))


def options(job: Job, gpus: int, gpu: Gpu, admits: Callable[[Layout], bool]) -> list[Option]:
    """Return all admissible layouts, the fastest first.

    Args:
        admits: whether the model and the backend accept a layout.
    """
    judged = (judge(layout, job, gpu) for layout in _layouts(gpus, job) if admits(layout))
    return sorted(judged, key=by_time)


def by_time(option: Option) -> tuple[float, int]:
    """Order options by time, and options of equal time by size."""
    return option.time.total, option.needs.peak


def _layouts(gpus: int, job: Job) -> Iterator[Layout]:
    experts = max(model.shape.experts for model in job.trained)
    has_mlp = any(model.shape.dense_layers for model in job.trained)
    recomputed = [
        recompute for recompute in get_args(Recompute)
        if (has_mlp or "mlp" not in recompute) and (experts or "moe" not in recompute)
    ]  # fmt: skip
    for tensor in _divisors(gpus, limit=GPUS_PER_NODE):
        for pipeline in _divisors(gpus // tensor, limit=job.shape.layers):
            for context in _divisors(gpus // tensor // pipeline, limit=GPUS_PER_NODE):
                data = gpus // tensor // pipeline // context
                if data > job.sequences:
                    continue
                # Experts stay whole and are spread over expert-parallel ranks only.
                for expert in _divisors(gpus // pipeline, limit=experts) if experts else (1,):
                    base = Layout(
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        data=data,
                        expert=expert,
                        expert_tensor=1 if expert > 1 else tensor,
                        sequence=tensor > 1,
                    )
                    base = replace(base, distributed=base.has_copies)
                    yield from (replace(base, recompute=recompute) for recompute in recomputed)


def _divisors(number: int, *, limit: int) -> list[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]
