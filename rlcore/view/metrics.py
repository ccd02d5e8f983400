"""The metrics of a run, read as they are appended."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

MAX_POINTS = 1200  # of a curve; each piece of a longer one shows its lowest and highest point
MAX_STEP = 1 << 62
Row = dict[str, float]


class MetricsTable:
    """Reads metrics.jsonl, and skips lines without metrics."""

    def __init__(self, path: Callable[[], Path]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._read = 0
        self._inode = 0
        self._rows: list[Row] = []
        self._names: dict[str, None] = {}

    @property
    def steps(self) -> list[int]:
        """The step of each row."""
        return [int(row["step"]) for row in self._rows]

    def refresh(self) -> None:
        """Read the appended lines; a file that was rewound is read again from its start."""
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
            for line in whole.splitlines():
                if row := _row_in(line):
                    self._rows.append(row)
                    self._names |= dict.fromkeys(row)
            self._read += len(whole)

    def names(self) -> list[str]:
        """Return the names of the metrics that the run has written."""
        self.refresh()
        return sorted(self._names)

    def curve(self, name: str) -> dict[str, Any]:
        """Return steps and values of a metric, thinned out if there are too many."""
        self.refresh()
        rows = [row for row in self._rows if name in row]
        steps = np.array([row["step"] for row in rows], dtype=np.int64)
        steps, values = thinned(steps, np.array([row[name] for row in rows], dtype=np.float64))
        return {"steps": steps, "values": values}

    def rows(self, steps: list[int]) -> list[dict[str, Any]]:
        """Return all metrics of some steps; {} for a step without metrics."""
        self.refresh()
        by_step = {row["step"]: row for row in self._rows}
        return [_shown(by_step.get(step, {})) for step in steps]

    def newest(self) -> dict[str, Any]:
        """Return the newest value of each metric that is still written."""
        self.refresh()
        return _shown(self._rows[-1]) if self._rows else {}

    def last(self, name: str) -> float | str | None:
        """Return the newest value of one metric."""
        found = next((row for row in reversed(self._rows) if name in row), {})
        return _shown(found).get(name)


def _row_in(line: bytes) -> Row | None:
    """Parse a line; None if it is not a row of metrics."""
    row = None
    try:
        row = orjson.loads(line)
    except ValueError:
        # Only Python's json accepts NaN.
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    # A larger whole number does not fit a float.
    known = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, float) or (isinstance(value, int) and abs(value) <= MAX_STEP)
    }
    return known if "step" in known else None


def _shown(row: Row) -> dict[str, float | str]:
    """Return a row for display; values that JSON cannot hold become text."""
    words = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return {
        name: value if math.isfinite(value) else words.get(value, "NaN")
        for name, value in row.items()
    }


def thinned(
    steps: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most `MAX_POINTS` points: the lowest, the highest and any NaN of each piece."""
    if len(values) <= MAX_POINTS:
        return steps, values
    unknown = np.isnan(values)
    kept: set[int] = {0, len(values) - 1}
    each = 3 if unknown.any() else 2
    for piece in np.array_split(np.arange(len(values)), MAX_POINTS // each - 1):
        known = piece[~unknown[piece]]
        if len(known):
            kept |= {int(known[values[known].argmin()]), int(known[values[known].argmax()])}
        kept.update(piece[unknown[piece]][:1].tolist())
    chosen = np.array(sorted(kept))
    return steps[chosen], values[chosen]
