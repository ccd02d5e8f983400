"""The parameters of a request, each read as the type that it must have."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.errors import DataError
from rlcore.view.samples import Filter

MAX_ROWS = 500  # of a page
_WHOLE = re.compile(r"\d{1,18}")
_PLACE = re.compile(r"(\d{1,12}):(\d{1,12})")


@dataclass(frozen=True)
class Parameters:
    """What stands behind the question mark of an address. All errors are DataError."""

    given: Mapping[str, Sequence[str]]

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value of a parameter; without a default it must be there."""
        found = self.given.get(name)
        if not found:
            if default is None:
                raise DataError(f"the parameter {name} is missing")
            return default
        return found[0]

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 0."""
        text = self.text(name, None if default is None else str(default))
        if not _WHOLE.fullmatch(text):
            raise DataError(f"{name} must be a whole number from 0, got {text[:40]!r}")
        return int(text)

    def limit(self, default: int = 100) -> int:
        """Return how many rows are wanted."""
        return min(self.whole("limit", default), MAX_ROWS)

    def places(self) -> list[tuple[int, int]]:
        """Return step and row of each `at=STEP:ROW`."""
        given = self.given.get("at", ())
        if len(given) > MAX_ROWS:
            raise DataError(f"at: {len(given)} samples were asked for, of at most {MAX_ROWS}")
        found = map(_PLACE.fullmatch, given)
        return [(int(match[1]), int(match[2])) for match in found if match]

    def filters(self) -> list[Filter]:
        """Return the conditions of `filter`: a JSON list of [column, comparison, value]."""
        text = self.text("filter", "[]")
        try:
            given = json.loads(text)
            return [_filter(*one) for one in given]
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"filter must be a list of [column, comparison, value], got {text[:80]!r} ({error})"
            ) from None


def _filter(column: object, comparison: object, value: object) -> Filter:
    if not isinstance(column, str) or not isinstance(comparison, str):
        raise ValueError("column and comparison are texts")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("the value is a number or a text")
    if isinstance(value, int | float) and not math.isfinite(value):
        raise ValueError("the value is finite")
    return Filter(column, comparison, value)
