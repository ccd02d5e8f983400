"""Reward parts that the event loop scores itself: cheaper than a call of another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rlcore.data.sample import Sample
from rollout.rewards.base import RewardPart, Score, Verdict, attempt

Grader = Callable[[Sample], Verdict]


class LocalPart(RewardPart):
    """A part whose grader is ours and quick."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        return [attempt(partial(self._grader, sample)) for sample in samples]
