"""The constructor arguments of workflows, and the check of their outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from rlcore.errors import RolloutFailed
from rollout.conversation.conversation import NO_LIMIT, WorkflowContext

__all__ = ["NO_LIMIT", "WorkflowContext", "checked_outcome"]


def checked_outcome(found: Any, name: str, place: str = "") -> dict[str, float] | None:
    """Validate the outcome that the user's code gave a rollout: numbers by name, or None.

    Raises:
        RolloutFailed: it is neither a finite number, nor such numbers by name, nor None.
    """
    if found is None:
        return None
    numbers = found if isinstance(found, Mapping) else {"reward": found}
    for part, number in numbers.items():
        if not isinstance(number, Real) or not math.isfinite(number):
            raise RolloutFailed(
                "result",
                f"{name} returned {type(found).__name__} {str(found)[:200]!r}, of which {part!r} is"
                " no finite number; expected a number or numbers by name, or None",
                place,
            )
    return {str(part): float(number) for part, number in numbers.items()}
