"""`rlcore show RUN`: samples of a step as text, and why a reward failed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rlcore.data.sample import Sample, branches_of
from rlcore.errors import DataError
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import read_rollouts
from rlcore.tracking.format import pick_samples, sample_lines

Order = Literal["spread", "worst", "best"]


def show_samples(
    path: Path, *, step: int | None, count: int, order: Order, characters: int
) -> Iterator[str]:
    """Yield samples that a step was trained on.

    Args:
        step: default: the newest that was recorded.
        order: `spread` picks them evenly from the best reward to the worst.
        characters: of a prompt or response; the middle of longer ones is left out.

    Raises:
        DataError: the run has no record of that step.
    """
    run = RunDirectory(path)
    recorded = run.recorded_steps()
    step = max(recorded, default=0) if step is None else step
    if step not in recorded:
        has = f"it has steps {min(recorded)} to {max(recorded)}" if recorded else "it has none"
        raise DataError(f"{path}: no samples of step {step} ({run.rollouts}); {has}")
    records = read_rollouts(run.rollouts_path(step), arrays=True)
    samples = [Sample.from_record(record) for record in records]
    rewards = [sample.reward for sample in samples if sample.is_scored]
    mean = sum(rewards) / max(len(rewards), 1)
    left_out = len(samples) - len(rewards)
    failed = f", {left_out} left out as their reward failed" if left_out else ""
    yield f"step {step}: {len(samples)} samples, mean reward {mean:.3g}{failed}"
    branches = branches_of((sample.draw, sample.rollout_id) for sample in samples)
    marks = {id(sample): str(branch) for sample, branch in zip(samples, branches)}
    for sample in _chosen(samples, count, order):
        head, *texts = sample_lines(sample, limit=characters)
        mark = f", {marks[id(sample)]}" if marks[id(sample)] else ""
        yield ""
        yield f"{sample.prompt_id}, draw {sample.draw}, sample {sample.index}{mark}: {head}"
        yield from texts
        if "reward_error" in sample.metadata:
            yield f"! {sample.metadata['reward_error']}"


def _chosen(samples: list[Sample], count: int, order: Order) -> list[Sample]:
    if order == "spread":
        return pick_samples(samples, count)
    sign = -1 if order == "best" else 1
    # of the worst, what has no score comes first
    return sorted(samples, key=lambda s: sign * s.reward if s.is_scored else sign * -math.inf)[
        :count
    ]
