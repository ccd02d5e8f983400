"""The reward `exact_match`: 1 where the response is the label, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.data.sample import Sample
from rollout.rewards.base import RewardPart, Score, Verdict


class ExactMatch(RewardPart):
    """Compares in the event loop, which is cheaper than a call of another process."""

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Compare response and label, ignoring white space around either."""
        return [Verdict(float(s.response_text.strip() == str(s.label).strip())) for s in samples]
