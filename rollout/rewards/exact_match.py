"""The reward `exact_match`: 1 where the response is the label, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.data.sample import Sample
from rollout.rewards.base import RewardPart, Score, checked


def exact_match(sample: Sample) -> float:
    """Compare response and label, ignoring white space around either."""
    return float(sample.response_text.strip() == str(sample.label).strip())


class InlinePart(RewardPart):
    """Runs `exact_match` in the event loop, which is cheaper than a call of another process."""

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        return [checked(exact_match(sample)) for sample in samples]
