"""The search over all layouts that a model admits: what each needs and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from rlcore.planning.communicators import (
    CHANNELS,
    nccl_bytes,
    publication_groups,
    training_groups,
)
from rlcore.planning.devices import GPUS_PER_NODE, Gpu
from rlcore.planning.fit import RESERVED, Frozen, Needs, Trained, needs, policy_weights
from rlcore.planning.host import StepArrays
from rlcore.planning.memory import Layout, Load, Recompute
from rlcore.planning.publication import Publication
from rlcore.planning.speed import StepTime, Work, step_time


@dataclass(frozen=True)
class Job:
    """The models to plan for, and the work of one optimizer step."""

    trained: tuple[Trained, ...]  # the policy first
    frozen: tuple[Frozen, ...]
    sequences: int  # of one optimizer step
    length: int  # tokens of each, at most
    trainable: int  # of those
    scoring_passes: int
    pack_tokens: int  # policy.max_tokens_per_microbatch
    dtype_bytes: int
    vocab_multiple: int
    chunk_elements: int
    siblings: int = 1  # sequences whose prompt, all but `trainable`, a pack holds once
    publication: Publication | None = None  # None: the run has no engines
    arrays: StepArrays | None = None  # of a whole training step, on rank 0
    async_save: bool = False
    nccl_channels: int = CHANNELS

    def load(self, layout: Layout) -> Load:
        """Return the size of a micro-batch under `layout`."""
        tokens = max(self.pack_tokens, self.length)
        return Load(
            tokens=tokens,
            micro_batches=self.micro_batches(layout),
            trainable=max(1, tokens * self.in_pack * self.trainable // self.micro_tokens),
            dtype_bytes=self.dtype_bytes,
            vocab_multiple=self.vocab_multiple,
            chunk_elements=self.chunk_elements,
        )

    @property
    def in_pack(self) -> int:
        """The number of whole sequences in a pack."""
        groups, behind = self._groups
        return max(1, groups * self.siblings + behind)

    @property
    def prompts_in_pack(self) -> int:
        """The number of prompts in a pack."""
        groups, behind = self._groups
        return max(1, groups + (behind > 0))

    @property
    def micro_tokens(self) -> int:
        """The number of tokens in a pack, each once."""
        prompt = self.length - self.trainable
        return self.prompts_in_pack * prompt + self.in_pack * self.trainable

    @property
    def _groups(self) -> tuple[int, int]:
        """The whole groups of a pack, and the sequences of one more that is cut."""
        prompt = self.length - self.trainable
        groups, rest = divmod(self.pack_tokens, prompt + self.siblings * self.trainable)
        return groups, max(0, (rest - prompt) // self.trainable)

    def micro_batches(self, layout: Layout) -> int:
        """Return the number of micro-batches of each replica, with sequences of one length."""
        packs = -(-max(1, -(-self.sequences // layout.data)) // self.in_pack)
        multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
        return -(-packs // multiple) * multiple


@dataclass(frozen=True)
class Option:
    """One layout with its needs and its time."""

    layout: Layout
    needs: Needs
    time: StepTime

    def fits(self, capacity: int) -> bool:
        """Whether it fits on GPUs of `capacity` bytes."""
        return self.needs.peak <= usable(capacity)


def usable(capacity: int) -> int:
    """Return the part of a GPU's memory that tensors can use."""
    return round(capacity * (1 - RESERVED))


def judge(layout: Layout, job: Job, gpu: Gpu) -> Option:
    """Estimate the needs and the time of a layout."""
    load = job.load(layout)
    shape = job.trained[0].shape
    work = Work(
        sequences=job.sequences,
        length=job.length,
        repeated=1 - job.prompts_in_pack / job.in_pack,
        trainable=job.trainable,
        scoring_passes=job.scoring_passes,
        micro_batches=load.micro_batches,
        micro_tokens=job.micro_tokens,
        dtype_bytes=job.dtype_bytes,
    )
    weights = policy_weights(layout, shape, load)
    found = needs(layout, load, job.trained, job.frozen, job.publication)
    groups = communicators(layout, job)
    if groups:
        size = nccl_bytes(groups, channels=job.nccl_channels)
        name = f"NCCL's buffers, {len(groups)} communicators"
        found = replace(found, resident=found.resident | {name: size})
    return Option(
        layout,
        found,
        step_time(shape, layout, work, weights, gpu),
    )


def communicators(layout: Layout, job: Job) -> dict[str, int]:
    """Return the NCCL groups that the busiest rank joins, with their sizes."""
    shape = job.trained[0].shape
    groups = training_groups(layout, moe=shape.experts > 0, tied=shape.tied)
    published = job.publication
    if published is None:
        return groups
    served = 0
    if published.transport == "distributed":
        served = -(-published.engines // published.sending_ranks(layout))
    return groups | publication_groups(
        layout, everywhere=published.is_everywhere(layout), engines=served
    )


def options(job: Job, gpus: int, gpu: Gpu, admits: Callable[[Layout], bool]) -> list[Option]:
    """Return all admissible layouts, the fastest first.

    Args:
        admits: whether the model and the backend accept a layout.
    """
    judged = [judge(layout, job, gpu) for layout in _layouts(gpus, job) if admits(layout)]
    return sorted(judged, key=by_time)


def by_time(option: Option) -> tuple[float, int]:
    """Order options: the fastest first, of equals the smallest."""
    return option.time.total, option.needs.peak


def _layouts(gpus: int, job: Job) -> Iterator[Layout]:
    experts = max(model.shape.experts for model in job.trained)
    layers = job.trained[0].shape.layers
    has_mlp = any(model.shape.moe_layers < model.shape.layers for model in job.trained)
    recomputed = [
        recompute for recompute in get_args(Recompute)
        if (has_mlp or "mlp" not in recompute) and (experts or "moe" not in recompute)
    ]  # fmt: skip
    for tensor in _divisors(gpus, limit=GPUS_PER_NODE):
        for pipeline in _divisors(gpus // tensor, limit=layers):
            for context in _divisors(gpus // tensor // pipeline, limit=GPUS_PER_NODE):
                data = gpus // tensor // pipeline // context
                if data > job.sequences:
                    continue
                # Experts are spread over expert-parallel ranks alone, whole.
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
