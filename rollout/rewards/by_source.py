"""Chooses the parts that score a row: by its value at `reward.by`, and the parts' `sources`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rlcore.config.sections.reward import RewardConfig
from rlcore.errors import DataError


class PartsBySource:
    """Knows which parts score which rows. A part without `sources` scores every row."""

    def __init__(self, config: RewardConfig) -> None:
        self._by = config.by
        self._sources = {name: part.sources for name, part in config.parts.items()}
        self._chosen: dict[tuple[str, ...], tuple[str, ...]] = {(): tuple(config.parts)}

    def of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the parts that score `row`.

        Raises:
            DataError: the row has no value at `reward.by`, or one that no part's `sources` know.
        """
        values = () if self._by is None else self._values(row, self._by)
        if values not in self._chosen:
            for value in values:
                if not any(_matches(value, sources) for sources in self._sources.values()):
                    raise DataError(
                        f"no reward part scores the source {value!r} (reward.by: {self._by}); known"
                        f" are {', '.join(self._known())}; add it to the `sources` of a part"
                    )
            self._chosen[values] = tuple(
                name
                for name, sources in self._sources.items()
                if sources is None or any(_matches(value, sources) for value in values)
            )
        return self._chosen[values]

    def _known(self) -> list[str]:
        return sorted({one for sources in self._sources.values() for one in sources or ()})

    def _values(self, row: Mapping[str, Any], by: str) -> tuple[str, ...]:
        found: Any = row
        for key in [by] if by in row else by.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        # open-instruct's `dataset` may be a list of verifiers
        values = tuple(found) if isinstance(found, list | tuple) else (found,)
        if not values or not all(isinstance(value, str | int) for value in values):
            raise DataError(
                f"the row has no text or list of texts at {by!r} (reward.by), got {found!r}; it has"
                f" the columns {', '.join(row) or 'none'}"
            )
        return tuple(str(value) for value in values)


def _matches(value: str, sources: list[str] | None) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in sources or ())
