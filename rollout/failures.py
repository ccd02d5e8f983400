"""Failures of rollouts and rewards: what failed, on which prompt, and which causes are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """Why a rollout was given up, or why a sample has no score."""

    kind: str  # a kind of `RolloutFailed`; for a reward "error" or "timeout"
    what: str  # the failed workflow or reward part
    where: str  # prompt and draw
    reason: str
    place: str  # ` (file:line in name)`, or empty

    def __str__(self) -> str:
        return f"{self.what} failed on {self.where}: {self.reason}{self.place}"

    @property
    def alike(self) -> Hashable:
        """A key that failures with the same cause share."""
        return self.what, self.kind, self.place or self.reason


def commonest(failures: Iterable[Failure]) -> tuple[Failure, int]:
    """The newest failure of the commonest cause, and the number of its occurrences."""
    found = list(failures)
    ((alike, count),) = Counter(failure.alike for failure in found).most_common(1)
    return next(failure for failure in reversed(found) if failure.alike == alike), count
