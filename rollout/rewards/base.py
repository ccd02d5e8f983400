"""What the parts of a reward have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol

import numpy as np

from rlcore.data.sample import Sample


@dataclass(frozen=True)
class RewardFailure:
    """A call that gave no score, and why."""

    kind: Literal["error", "timeout"]
    reason: str


Score = float | RewardFailure


class RewardPart(Protocol):
    """One named part of the reward. A failure is a value, not an exception: it concerns one sample."""

    async def start(self) -> None: ...

    async def score(self, samples: Sequence[Sample]) -> list[Score]: ...

    async def close(self) -> None: ...


def checked(value: Any) -> Score:
    """A finite real number as float; anything else is a failure."""
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
