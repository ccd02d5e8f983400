"""Reads a run's progress from its folder, and names moments that do not depend on speed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from rlcore.runs.checkpoints import committed_steps
from tests.soak.workload import STEPS

# The share of kills in each phase: a checkpoint or a publication of a small model is too short to
# be hit by chance.
WEIGHTS = {"start": 1, "step": 4, "publication": 2, "checkpoint": 2, "end": 1}


@dataclass(frozen=True)
class Progress:
    """Counters that only grow."""

    versions: int = 0  # publications begun
    published: int = 0  # the step whose weights the last of them is of
    rows: int = 0  # steps in the log
    begun: int = 0  # the last step whose checkpoint was begun
    committed: int = 0  # the last step whose checkpoint is complete

    @classmethod
    def of(cls, folder: Path) -> Progress:
        versions = _lines(folder / "versions.jsonl")
        checkpoints = folder / "checkpoints"
        committed = max(committed_steps(checkpoints), default=0)
        aside = [
            int(path.name[len(".step_") : -len(".tmp")]) for path in checkpoints.glob(".step_*.tmp")
        ]
        return cls(
            versions=len(versions),
            published=json.loads(versions[-1])["step"] if versions else 0,
            rows=len(_lines(folder / "metrics.jsonl")),
            begun=max([committed, *aside]),
            committed=committed,
        )

    def reached(self, other: Progress) -> bool:
        return all(mine >= theirs for mine, theirs in zip(astuple(self), astuple(other)))

    @property
    def phase(self) -> str:
        """One of WEIGHTS."""
        if not self.versions:
            return "start"
        if self.begun > self.committed:
            return "checkpoint"
        if self.published > self.rows:
            return "publication"
        return "step" if self.rows < STEPS else "end"

    def __str__(self) -> str:
        return {
            "start": "before the first publication",
            "checkpoint": f"in the checkpoint of step {self.begun}",
            "publication": (
                f"in the publication after step {self.published}, or the end of the step"
            ),
            "step": f"in the rollouts or the update of step {self.rows + 1}",
            "end": "in the export, or the end of the run",
        }[self.phase]


@dataclass(frozen=True)
class Moment:
    """A moment: `seconds` after a run has made the progress `after`."""

    after: Progress
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """An undisturbed run: when its progress changed, in seconds from its start."""

    changes: Sequence[tuple[float, Progress]]  # the first at 0
    seconds: float  # of the whole run

    def draw(self, chance: random.Random) -> Moment:
        """Draw a moment of this run: first a phase, by WEIGHTS, then a moment of it, uniformly."""
        ends = [at for at, _ in self.changes[1:]] + [self.seconds]
        spans: dict[str, list[tuple[Progress, float]]] = {}
        for (at, progress), end in zip(self.changes, ends, strict=True):
            spans.setdefault(progress.phase, []).append((progress, end - at))
        (phase,) = chance.choices(list(spans), [WEIGHTS[phase] for phase in spans])
        left = chance.uniform(0, sum(length for _, length in spans[phase]))
        for progress, length in spans[phase][:-1]:
            if left <= length:
                return Moment(progress, left)
            left -= length
        return Moment(spans[phase][-1][0], left)


def _lines(path: Path) -> list[str]:
    """The complete lines of a file."""
    return path.read_text().split("\n")[:-1] if path.exists() else []
