"""Failures of rollouts and of rewards: what failed on which prompt, and which are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """Says why a rollout was given up, or why a sample has no score."""

    kind: str  # of a rollout see `RolloutFailed`, of a reward "error" or "timeout"
    what: str  # the workflow or the part of the reward that failed
    where: str  # prompt and draw
    reason: str
    place: str  # ` (file:line in name)`, or empty

    def __str__(self) -> str:
        return f"{self.what} failed on {self.where}: {self.reason}{self.place}"

    @property
    def alike(self) -> Hashable:
        """What failures with the same cause have in common."""
        return self.what, self.kind, self.place or self.reason


def commonest(failures: Iterable[Failure]) -> tuple[Failure, int]:
    """Return the newest of the failures that occur most often, and how often they do."""
    found = list(failures)
    ((alike, count),) = Counter(failure.alike for failure in found).most_common(1)
    return next(failure for failure in reversed(found) if failure.alike == alike), count
