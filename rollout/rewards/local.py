"""Reward parts that the event loop scores itself: cheaper than a call of another process."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.data.sample import Sample
from rollout.rewards.base import RewardPart, Score
from rollout.rewards.loading import RewardFunction, scored


class LocalPart(RewardPart):
    """A part whose function is ours and quick."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        return [scored(self._function, sample) for sample in samples]
