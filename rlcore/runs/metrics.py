"""metrics.jsonl: one JSON object a step, `{"step": 12, "objective/kl": 0.003, ...}`.

Non-finite values are written as Python's json does (`NaN`, `Infinity`), so that reading restores
the logged values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import DataError
from rlcore.runs.files import append_json_line, cut_torn_line, read_json_lines, write_atomic


class MetricsFile:
    """The metrics file of a run, for a single writer. A last line torn by a kill is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            cut_torn_line(path)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of `step`. Once this returns, a kill of the process does not lose it."""
        values = {name: float(value) for name, value in metrics.items()}
        append_json_line(self.path, {"step": step, **values})

    def rewind(self, step: int) -> int:
        """Delete every line after `step`, in one rename: the run continues from there.

        Returns:
            The number of deleted lines.
        """
        rows = read_metrics(self.path)
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            write_atomic(self.path, "".join(kept).encode())
        return len(rows) - len(kept)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all rows in file order, except a last line without newline.

    Raises:
        DataError: a line is not a JSON object with a `step`; names it.
    """
    rows = read_json_lines(path)
    for number, row in enumerate(rows, start=1):
        if type(row.get("step")) is not int:
            raise DataError(
                f"{path}:{number}: expected an object with an integer `step`, got"
                f" {json.dumps(row)[:80]!r}"
            )
    return rows
