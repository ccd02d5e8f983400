"""Defines what the parts of a reward have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np

from rlcore.data.sample import Sample


@dataclass(frozen=True)
class RewardFailure:
    """Says why a call gave no score."""

    kind: Literal["error", "timeout"]
    reason: str


Score = float | RewardFailure


class RewardPart:
    """One named part of the reward.

    A failure is a value and not an exception, since it concerns one sample.
    """

    async def start(self) -> None:
        """Make ready to score."""

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """The score or failure of each sample."""
        raise NotImplementedError

    async def close(self) -> None:
        """End what `start` began."""


def checked(value: Any) -> Score:
    """`value` as float if it is a finite real number, else a failure."""
    if not isinstance(value, Real | np.bool_):
        return RewardFailure(
            "error", f"returned {type(value).__name__} {str(value)[:80]!r}, expected a number"
        )
    number = float(value)
    return (
        number
        if math.isfinite(number)
        else RewardFailure("error", f"returned {number}, expected a finite number")
    )
