"""The metrics of a run as columns, read as they are appended.

Each column says where it has a value, as NaN is one: that of a run that diverged.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

MOST_POINTS = 1200  # of a curve; of longer ones each piece shows its lowest and highest point
MOST_STEPS = 1 << 62
ROWS_AT_ONCE = 1000
MOST_METRICS = 5000  # names: bounds the memory that a file of nonsense takes


class MetricsTable:
    """Reads metrics.jsonl; lines that are no metrics are left out."""

    def __init__(self, path: Callable[[], Path]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._read = 0
        self._inode = 0
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._there: dict[str, bytearray] = {}  # of each column, 1 where a value was written

    def refresh(self) -> None:
        """Read what was appended; a file that was rewound is read anew."""
        with self._lock:
            path = self._path()
            try:
                found = path.stat()
            except OSError:
                self._forget()
                return
            if found.st_ino != self._inode or found.st_size < self._read:
                self._forget()
                self._inode = found.st_ino
            with open(path, "rb") as file:
                file.seek(self._read)
                added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            lines = whole.splitlines()
            for start in range(0, len(lines), ROWS_AT_ONCE):
                rows = map(self._row_in, lines[start : start + ROWS_AT_ONCE])
                self._take([row for row in rows if row is not None])
            self._read += len(whole)

    def _row_in(self, line: bytes) -> dict[str, Any] | None:
        """Parse a line; None where it is no row of metrics."""
        try:
            row = orjson.loads(line)
        except ValueError:
            row = self._with_nan(line)
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            return None
        return row if abs(row["step"]) <= MOST_STEPS else None

    def _take(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to the columns, a column at a time: rows are many, and most are alike."""
        before = len(self.steps)
        self.steps.extend(row["step"] for row in rows)
        for name in dict.fromkeys(chain.from_iterable(rows)):
            added, there = _numbers([row.get(name) for row in rows])
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_METRICS or not any(there):
                    continue
                self._there[name] = bytearray()
                column = self._columns[name] = array("d")
            lacking = before - len(column)
            self._there[name] += bytes(lacking) + there  # first: a reader goes by the column
            column.extend([math.nan] * lacking)
            column.extend(added)

    def _with_nan(self, line: bytes) -> Any:
        """Parse what only Python's json reads; None where there is nothing to read."""
        try:
            return json.loads(line)
        except ValueError:
            return None

    def names(self) -> list[str]:
        """Return the metrics that the run has written."""
        self.refresh()
        return sorted(self._columns)

    def curve(self, name: str) -> dict[str, Any]:
        """Return steps and values of a metric, thinned out where there are too many."""
        self.refresh()
        values, there = self._column(name)
        steps = np.array(self.steps, dtype=np.int64)[: len(values)]
        steps, values = thinned(steps[there], values[there])
        return {"steps": steps, "values": values}

    def rows(self, steps: list[int]) -> list[dict[str, Any]]:
        """Return all metrics of some steps; {} for a step without any."""
        self.refresh()
        places = {step: place for place, step in enumerate(self.steps)}
        return [self._row(places[step]) if step in places else {} for step in steps]

    def newest(self) -> dict[str, Any]:
        """Return the newest value of each metric that is still written."""
        self.refresh()
        return self._row(len(self.steps) - 1) if self.steps else {}

    def last(self, name: str) -> float | str | None:
        """Return the newest value of one metric."""
        values, there = self._column(name)
        found = values[there]
        return _shown(float(found[-1])) if len(found) else None

    def _row(self, place: int) -> dict[str, Any]:
        return {
            name: _shown(column[place])
            for name, column in self._columns.items()
            if place < len(column) and self._there[name][place]
        }

    def _column(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        values = np.array(self._columns.get(name, ()), dtype=np.float64)
        there = np.array(self._there.get(name, bytearray()), dtype=np.bool_)
        return values, there[: len(values)]


def _shown(value: float) -> float | str:
    """Return a value for a cell; one that JSON does not know as its text."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _numbers(values: Sequence[Any]) -> tuple[array[float], bytes]:
    """Return the values as floats, and 1 for each that is a number and not too large for one."""
    try:
        return array("d", values), b"\1" * len(values)
    except (TypeError, OverflowError):
        found = [*map(_number, values)]
        there = bytes(value is not None for value in found)
        return array("d", (math.nan if value is None else value for value in found)), there


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def thinned(
    steps: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most `MOST_POINTS` points: the lowest, the highest and a NaN of each piece."""
    if len(values) <= MOST_POINTS:
        return steps, values
    unknown = np.isnan(values)
    kept: set[int] = {0, len(values) - 1}
    each = 3 if unknown.any() else 2
    for piece in np.array_split(np.arange(len(values)), MOST_POINTS // each - 1):
        known = piece[~unknown[piece]]
        if len(known):
            kept |= {int(known[values[known].argmin()]), int(known[values[known].argmax()])}
        kept.update(piece[unknown[piece]][:1].tolist())
    chosen = np.array(sorted(kept))
    return steps[chosen], values[chosen]
