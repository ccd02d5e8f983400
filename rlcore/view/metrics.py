"""The metrics of a run as columns, read as they are appended."""

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
            added = _numbers([row.get(name) for row in rows])
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_METRICS or all(map(math.isnan, added)):
                    continue
                column = self._columns[name] = array("d")
            column.extend([math.nan] * (before - len(column)))
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
        values = self._column(name)
        steps = np.array(self.steps, dtype=np.int64)[: len(values)]
        there = ~np.isnan(values)
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

    def last(self, name: str) -> float | None:
        """Return the newest value of one metric."""
        values = self._column(name)
        there = np.flatnonzero(~np.isnan(values))
        return float(values[there[-1]]) if len(there) else None

    def _row(self, place: int) -> dict[str, Any]:
        found = {name: c[place] for name, c in self._columns.items() if place < len(c)}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _column(self, name: str) -> NDArray[np.float64]:
        return np.array(self._columns.get(name, ()), dtype=np.float64)


def _numbers(values: Sequence[Any]) -> array[float]:
    """Return the values as floats, with NaN for what is no number or too large for one."""
    try:
        return array("d", values)
    except (TypeError, OverflowError):
        return array("d", map(_number, values))


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def thinned(
    steps: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most `MOST_POINTS` points: of each piece the lowest and the highest."""
    if len(values) <= MOST_POINTS:
        return steps, values
    kept: set[int] = {0, len(values) - 1}
    for piece in np.array_split(np.arange(len(values)), MOST_POINTS // 2 - 1):
        kept |= {int(piece[values[piece].argmin()]), int(piece[values[piece].argmax()])}
    chosen = np.array(sorted(kept))
    return steps[chosen], values[chosen]
