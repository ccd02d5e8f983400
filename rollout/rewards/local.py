"""Reward parts that the event loop scores itself: cheaper than a call of another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlcore.data.sample import Sample
from rollout.rewards.base import RewardFailure, RewardPart, Score, Verdict

Grader = Callable[[Sample], Verdict]


class LocalPart(RewardPart):
    """A part whose grader is ours and quick."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        try:
            return self._grader(sample)
        except ValueError as error:  # of a label that it cannot read
            return RewardFailure("error", f"raised ValueError: {error}")
