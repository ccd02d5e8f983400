"""metrics.jsonl: one JSON object a step, `{"step": 12, "objective/kl": 0.003, ...}`.

Non-finite values are written as Python's json does (`NaN`, `Infinity`), so that reading gives back
what was logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import DataError
from rlcore.runs.files import cut_torn_line, write_atomic


class MetricsFile:
    """The metrics file of a run, for its one writer. A last line that a kill tore is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            cut_torn_line(path)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of `step`. Once this returns, a kill of the process does not lose it."""
        row = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        with open(self.path, "ab") as file:
            file.write(_line(row))

    def rewind(self, step: int) -> int:
        """Delete every line after `step`, in one rename: the run goes on from there.

        Returns how many.
        """
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            write_atomic(self.path, b"".join(map(_line, kept)))
        return len(rows) - len(kept)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all rows, in file order.

    A last line without its newline is left out: it is being written, or was torn by a kill.

    Raises:
        DataError: a line is not a JSON object with a `step`; names it.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}:{number}: not JSON ({error}); delete the line to go on without it"
            ) from None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise DataError(
                f"{path}:{number}: expected an object with an integer `step`, got"
                f" {line[:80].decode(errors='replace')!r}"
            )
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
