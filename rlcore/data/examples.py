"""The rows of all sources as examples: found in their format, dressed as the configuration says."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from rlcore.config.sections.data import DataConfig
from rlcore.data.formats import SOURCE, Example, RowLayout, layout_of
from rlcore.data.messages import dress
from rlcore.data.paths.hub import check_path, expand, open_path
from rlcore.data.rows import RowFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """The rows of one file or data set, and how they are read."""

    path: str
    rows: RowFile
    layout: RowLayout
    data: DataConfig
    source: str | None = None  # the name in data.sources

    def __str__(self) -> str:
        return f"{self.path}: {len(self.rows):,} rows, {self.layout}"

    def example(self, index: int, row: dict[str, Any]) -> Example:
        """Make an example of row `index`. Raises DataError for a bad row."""
        found = self.layout.example(
            self.rows.where(index), row, nulls_are_absent=self.rows.fills_with_null
        )
        extra = found.extra if self.source is None else {**found.extra, SOURCE: self.source}
        return replace(
            found,
            prompt=dress(found.prompt, self.data),
            extra=extra,
            tools=found.tools or self.data.tools,
            chat_kwargs=self.data.chat_template_kwargs,
        )


class Examples(Sequence[Example]):
    """All rows, in the order of the sources and their files; each is read when it is asked for."""

    def __init__(
        self, parts: Sequence[Part], transform: Callable[[Example], Example] = lambda e: e
    ) -> None:
        self.parts = tuple(parts)
        self._transform = transform
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part.rows))

    def __len__(self) -> int:
        return self._starts[-1]

    def part(self, index: int) -> tuple[Part, int]:
        """Return the file of a row, and the row's index in it."""
        at = bisect_right(self._starts, index) - 1
        return self.parts[at], index - self._starts[at]

    def where(self, index: int) -> str:
        """Return "file:line" of a row."""
        part, at = self.part(index)
        return part.rows.where(at)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index >= len(self):
            raise IndexError(index)
        part, at = self.part(index)
        return self._transform(part.example(at, part.rows[at]))

    def __iter__(self) -> Iterator[Example]:
        for part in self.parts:
            for at, row in enumerate(part.rows):
                yield self._transform(part.example(at, row))


def open_examples(
    data: DataConfig,
    paths: Sequence[str] | None = None,
    transform: Callable[[Example], Example] = lambda e: e,
) -> Examples:
    """Open the files of `data`, and tell the log in which format they are.

    Args:
        paths: these files instead, with the keys of `data` itself.

    Raises:
        DataError: a file that cannot be read.
    """
    parts = []
    for name, own, path in _wanted(data, paths):
        rows = open_path(path, subset=own.subset, split=own.split)
        parts.append(Part(path, rows, layout_of(rows, own), own, name))
        logger.info("data: %s", parts[-1])
    return Examples(parts, transform)


def check_examples(data: DataConfig, paths: Sequence[str] | None = None) -> None:
    """Refuse files that are not there (DataError); reads none. Arguments as `open_examples`."""
    for _, _, path in _wanted(data, paths):
        check_path(path)


def _wanted(
    data: DataConfig, paths: Sequence[str] | None
) -> Iterator[tuple[str | None, DataConfig, str]]:
    """Yield each file or data set, with its source and the keys that it is read by."""
    given: list[tuple[str | None, DataConfig, Sequence[str]]]
    if paths is None and data.sources:
        sources = {name: data.of_source(name) for name in data.sources}
        given = [(name, own, own.paths) for name, own in sources.items()]
    else:
        given = [(None, data, data.paths if paths is None else paths)]
    for name, own, several in given:
        for path in several:
            yield from ((name, own, file) for file in expand(path, own.split))
