"""Which samples of a step are worth a look."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.data.sample import Sample


def pick_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples spread evenly from the best reward to the worst: a step's first ones would
    all answer one prompt.
    """
    ranked = sorted(samples, key=lambda sample: -sample.reward)
    if count >= len(ranked):
        return ranked
    if count <= 1:
        return ranked[:count]
    return [ranked[row * (len(ranked) - 1) // (count - 1)] for row in range(count)]
