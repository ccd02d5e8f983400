"""Finds samples in columns: filters and orders over millions of rows, piece by piece."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlcore.errors import DataError
from rlcore.runs.sample_index import NAMED, SampleIndex

PIECE = 1 << 19  # rows looked at together: their columns fit into a cache
DEEPEST = 20_000  # rows that an order is worked out for
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
Rows = NDArray[np.int64]


class Place(NamedTuple):
    """Where a sample is: its step and its row in the recording."""

    step: int
    row: int


@dataclass(frozen=True)
class Filter:
    """A condition on one column; `value` is a text for columns of names."""

    column: str
    comparison: str
    value: float | str


@dataclass(frozen=True)
class Found:
    """The samples that were asked for, and how many there are in all."""

    total: int
    places: list[Place]


@dataclass(frozen=True)
class Span:
    """Rows of one index that lie side by side, of steps in increasing order."""

    index: SampleIndex
    steps: NDArray[np.int64]
    firsts: Rows  # first row of each step
    end: int

    def places(self, rows: Rows) -> list[Place]:
        """Return the step of each row, and its place in it."""
        which = np.searchsorted(self.firsts, rows, side="right") - 1
        return [Place(int(self.steps[k]), int(row - self.firsts[k])) for k, row in zip(which, rows)]

    def newest_first(self, rows: Rows, most: int) -> list[Place]:
        """Return the places of up to `most` rows: newest step first, as recorded within it."""
        which = np.searchsorted(self.firsts, rows, side="right") - 1
        return self.places(rows[np.lexsort((rows, -which))[:most]])

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield first and last row of pieces of whole steps, newest first."""
        last = self.end
        while last > self.firsts[0]:
            k = int(np.searchsorted(self.firsts, last - PIECE))
            k = min(k, int(np.searchsorted(self.firsts, last)) - 1)  # at least one step
            yield int(self.firsts[k]), last
            last = int(self.firsts[k])


def spans_of(blocks: Sequence[tuple[int, SampleIndex]]) -> list[Span]:
    """Join the blocks of steps, newest first, into as few spans as possible."""
    spans: list[Span] = []
    steps: list[int] = []
    for number, (step, index) in enumerate(blocks):
        steps.append(step)
        block = index.blocks[step]
        following = blocks[number + 1] if number + 1 < len(blocks) else None
        joins = (
            following is not None
            and following[1] is index
            and (before := index.blocks[following[0]]).first + before.rows == block.first
        )
        if not joins:
            spans.append(_span(index, steps[::-1]))
            steps = []
    return spans


def _span(index: SampleIndex, steps: list[int]) -> Span:
    last = index.blocks[steps[-1]]
    firsts = np.array([index.blocks[step].first for step in steps], dtype=np.int64)
    return Span(index, np.array(steps, dtype=np.int64), firsts, last.first + last.rows)


def select(
    spans: Sequence[Span],
    filters: Sequence[Filter] = (),
    *,
    order: str = "",
    descending: bool = False,
    offset: int = 0,
    limit: int = 100,
) -> Found:
    """Find samples.

    Args:
        spans: newest first.
        order: a column; default: newest step first, in the order of the recording.

    Raises:
        DataError: a filter or order that no index knows, or a page beyond `DEEPEST`.
    """
    wanted = offset + limit
    if wanted > DEEPEST:
        raise DataError(f"rows up to {wanted} were asked for, of at most {DEEPEST}: filter more")
    if order:
        return _ordered(spans, filters, order, descending, offset, wanted)
    total = 0
    places: list[Place] = []
    for span, first, passes in _matches(spans, filters):
        total += int(np.count_nonzero(passes))
        if len(places) < wanted:
            places += span.newest_first(np.flatnonzero(passes) + first, wanted - len(places))
    return Found(total, places[offset:])


def _matches(
    spans: Sequence[Span], filters: Sequence[Filter]
) -> Iterator[tuple[Span, int, NDArray[np.bool_]]]:
    """Yield pieces, newest first: the span, the first row, and which rows pass."""
    for span in spans:
        for first, last in span.pieces():
            passes = np.ones(last - first, dtype=np.bool_)
            for one in filters:
                passes &= _passes(span.index, one, first, last)
            yield span, first, passes


def _passes(index: SampleIndex, one: Filter, first: int, last: int) -> NDArray[np.bool_]:
    compare = COMPARISONS.get(one.comparison)
    if compare is None:
        raise DataError(f"{one.comparison!r} is no comparison; use {' '.join(COMPARISONS)}")
    if one.column not in index.columns:  # a part that this index has no sample of
        return np.zeros(last - first, dtype=np.bool_)
    values = index.column(one.column)[first:last]
    value = one.value
    if one.column in NAMED:
        names = index.names[one.column]
        value = names.index(str(value)) if value in names else -1
    elif isinstance(value, str):
        raise DataError(f"{one.column} is compared with a number, got {value!r}")
    if values.dtype.kind in "iu":  # as integers: 64 bits of them do not fit into a float
        limits = np.iinfo(values.dtype)
        if value != int(value) or not limits.min <= value <= limits.max:
            return np.asarray(compare(values.astype(np.float64), float(value)))
        value = int(value)
    return np.asarray(compare(values, values.dtype.type(value)))


def _ordered(
    spans: Sequence[Span],
    filters: Sequence[Filter],
    order: str,
    descending: bool,
    offset: int,
    wanted: int,
) -> Found:
    """Keep the best `wanted` rows while going over all; NaN comes last.

    Of equal values those visited first come first, then by row: in the same order on every page.
    """
    total = 0
    best: NDArray[Any] = np.zeros(0)
    visits = np.zeros(0, dtype=np.int64)
    rows = np.zeros(0, dtype=np.int64)
    visited: list[Span] = []
    for visit, (span, first, passes) in enumerate(_matches(spans, filters)):
        visited.append(span)
        total += int(np.count_nonzero(passes))
        if order not in span.index.columns:
            continue
        values = span.index.column(order)[first : first + len(passes)]
        if len(best) == wanted and np.isfinite(best[-1]):
            passes &= values > -best[-1] if descending else values < best[-1]
        hits = np.flatnonzero(passes)
        own = _keys(values[hits], descending)
        nearest = _nearest(own, wanted)
        best = np.concatenate([best, own[nearest]])
        visits = np.concatenate([visits, np.full(len(nearest), visit)])
        rows = np.concatenate([rows, hits[nearest] + first])
        kept = np.lexsort((rows, visits, best))[:wanted]
        best, visits, rows = best[kept], visits[kept], rows[kept]
    chosen = zip(visits[offset:].tolist(), rows[offset:])
    return Found(total, [visited[k].places(np.array([row]))[0] for k, row in chosen])


def _nearest(keys: NDArray[np.float64], wanted: int) -> Rows:
    """Return where the `wanted` lowest keys are; of those equal to the last one, the first."""
    if len(keys) <= wanted:
        return np.arange(len(keys))
    edge = np.partition(keys, wanted - 1)[wanted - 1]
    under = np.flatnonzero(keys < edge)
    return np.concatenate([under, np.flatnonzero(keys == edge)[: wanted - len(under)]])


def _keys(values: NDArray[Any], descending: bool) -> NDArray[np.float64]:
    """Return numbers whose increasing order is the one asked for."""
    keys = values.astype(np.float64)
    if descending:
        np.negative(keys, out=keys)
    keys[np.isnan(keys)] = np.inf
    return keys
