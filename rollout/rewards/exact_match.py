"""1 where the response is the label, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.data.sample import Sample
from rollout.rewards.base import Score, checked


def exact_match(sample: Sample) -> float:
    """White space around either is ignored."""
    return float(sample.response_text.strip() == str(sample.label).strip())


class InlinePart:
    """`exact_match` in the event loop: bounded work, cheaper than any hand-over."""

    async def start(self) -> None: ...

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [checked(exact_match(sample)) for sample in samples]

    async def close(self) -> None: ...
