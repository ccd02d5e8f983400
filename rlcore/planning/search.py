"""The search over all layouts that a model admits: what each needs and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from rlcore.planning.devices import GPUS_PER_NODE, Gpu
from rlcore.planning.fit import Needs, needs, usable
from rlcore.planning.job import Job
from rlcore.planning.memory import Layout, Recompute
from rlcore.planning.speed import StepTime, step_time


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
    judged = [judge(layout, job, gpu) for layout in _layouts(gpus, job) if admits(layout)]
    return sorted(judged, key=by_time)


def by_time(option: Option) -> tuple[float, int]:
    """Order options: the fastest first, of equals the smallest."""
    return option.time.total, option.needs.peak


def _layouts(gpus: int, job: Job) -> Iterator[Layout]:
    experts = max(model.shape.experts for model in job.trained)
    has_mlp = any(model.shape.moe_layers < model.shape.layers for model in job.trained)
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
