"""Finds samples: DuckDB reads the scalars in a run's index/, and the texts in its recordings."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlcore.errors import DataError
from rlcore.runs.sample_index import COLUMNS, MERGED, NAMED

PART = "part."  # prefix of columns with a part of the reward
COMPARISONS = ("<", "<=", "=", "!=", ">=", ">")
MAX_STEPS_OF_NAMES = 50  # steps that are searched for names of sources, parts, ...
MAX_PARTS = 200
MAX_INTEGER = 1 << 63
# The scalars of a sample, by column.
Row = dict[str, Any]
# Folder names may look like partitions, so DuckDB must not parse them.
TABLE = "read_parquet({}, hive_partitioning=false, file_row_number={}) AS {}"
# JSON holds the texts of a conversation and of a label.
SEARCH = """
    contains(lower(concat_ws(chr(10), prompt_text, response_text, recording.prompt_id)), $text)
    OR contains(lower(concat_ws(chr(10), label, messages, metadata)), $quoted)
"""


@dataclass(frozen=True)
class Filter:
    """A condition on a column; `value` is a text for columns of names."""

    column: str
    comparison: str
    value: float | str


@dataclass(frozen=True)
class Found:
    """The requested samples, and the number of all that match."""

    total: int
    rows: list[Row]


class Samples:
    """Finds samples of a run.

    Args:
        files: returns the tables of scalars on the disk, by step in order.
        merged: returns the tables that cover several steps, by the last step.
    """

    def __init__(
        self, files: Callable[[], dict[int, Path]], merged: Callable[[], dict[int, Path]] = dict
    ) -> None:
        self._files = files
        self._merged = merged
        # Never download extensions: all that are needed are built in.
        self._database = duckdb.connect(config={"autoinstall_known_extensions": "false"})
        self._columns: tuple[list[int], dict[str, list[str]]] = ([], {})

    def steps(self) -> list[int]:
        """Return the steps with scalars, in order."""
        return [*self._files()]

    def count(self) -> int:
        """Return the number of samples."""
        tables = self._tables(0, MAX_INTEGER)
        return sum(_rows_of(path, path.stat().st_mtime_ns) for path in tables)

    def columns(self) -> dict[str, list[str]]:
        """Return the columns for queries; columns of names come with their names."""
        files = self._files()
        looked_at = np.linspace(0, len(files) - 1, min(len(files), MAX_STEPS_OF_NAMES)).round()
        steps = [[*files][int(at)] for at in looked_at]
        if steps != self._columns[0]:
            known: dict[str, list[str]] = {name: [] for name in COLUMNS if name != "parts"}
            chosen = [files[step] for step in steps]
            for name in NAMED:
                names = self._query(f"SELECT DISTINCT {name} FROM {{}} ORDER BY 1", chosen)
                known[name] = [text for (text,) in names]
            keys = f"SELECT DISTINCT unnest(map_keys(parts)) FROM {{}} ORDER BY 1 LIMIT {MAX_PARTS}"
            known |= {PART + name: [] for (name,) in self._query(keys, chosen)}
            self._columns = (steps, known)
        return self._columns[1]

    def select(
        self,
        first: int,
        last: int,
        filters: Sequence[Filter] = (),
        *,
        order: str = "",
        offset: int = 0,
        limit: int = 100,
    ) -> Found:
        """Find samples of steps `first` to `last`.

        Args:
            order: a column, with "-" before it for descending order; missing values come last.
                Default: newest step first, in the order of the recording.

        Raises:
            DataError: a filter or `order` names an unknown column.
        """
        files = self._tables(first, last)
        if not files:
            return Found(0, [])
        where, values = _conditions(filters)
        [(total,)] = self._query(f"SELECT count(*) FROM {{}} WHERE {where}", files, values)
        by = "step DESC, row"
        if order:
            column, named = _column(order.removeprefix("-"), "order")
            by = f"{column} {'DESC' if order.startswith('-') else 'ASC'} NULLS LAST, {by}"
            values |= named
        page = f"LIMIT {limit:d} OFFSET {offset:d}"
        # Read all columns only for the rows that are shown.
        sql = (
            f"WITH found AS (SELECT step, row FROM {{}} WHERE {where} ORDER BY {by} {page})"
            f" SELECT * FROM {{}} WHERE (step, row) IN (FROM found) ORDER BY {by}"
        )
        return Found(total, [*map(_row, self._query(sql, files, values))])

    def search(self, step: int, recording: Path, text: str, filters: Sequence[Filter]) -> list[Row]:
        """Return the samples of a step that contain a text in prompt, answer, label or error."""
        files = [path for known, path in self._files().items() if known == step]
        if not files:
            return []
        where, values = _conditions(filters)
        lowered = text.lower()
        values |= {"text": lowered, "quoted": json.dumps(lowered, ensure_ascii=False)[1:-1]}
        values["recording"] = [glob.escape(str(recording))]
        texts = TABLE.format("$recording", "true", "recording")
        sql = (
            f"SELECT scalars.* FROM {{}} JOIN {texts} ON scalars.row = recording.file_row_number"
            f" WHERE ({SEARCH}) AND {where} ORDER BY scalars.row"
        )
        return [*map(_row, self._query(sql, files, values))]

    def rewards(self, step: int) -> NDArray[np.float64]:
        """Return the rewards of a step's samples, without missing ones."""
        found = self.select(step, step, limit=MAX_INTEGER - 1).rows
        rewards = np.array([row["reward"] for row in found], dtype=np.float64)
        return rewards[np.isfinite(rewards)]

    def _tables(self, first: int, last: int) -> list[Path]:
        """Return the fewest files that cover the scalars of steps `first` to `last`."""
        files = {step: path for step, path in self._files().items() if first <= step <= last}
        tables = []
        for end, path in self._merged().items():
            steps = range(end - MERGED + 1, end + 1)
            if all(step in files for step in steps):
                tables.append(path)
                for step in steps:
                    del files[step]
        return [*tables, *files.values()]

    def _query(
        self, sql: str, files: Iterable[Path], values: dict[str, Any] | None = None
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a query; `{}` in it stands for the tables in `files`."""
        named = {"files": [glob.escape(str(path)) for path in files], **(values or {})}
        try:
            table = TABLE.format("$files", "false", "scalars")
            return self._database.cursor().execute(sql.replace("{}", table), named).fetchall()
        except duckdb.Error as error:
            raise DataError(f"samples cannot be read: {error}") from error


@cache
def _rows_of(path: Path, changed_ns: int) -> int:
    """Return the number of rows of a table; `changed_ns` marks its version."""
    return pq.read_metadata(path).num_rows


def _row(values: Sequence[Any]) -> Row:
    row = dict(zip(COLUMNS, values))
    return row | {PART + name: value for name, value in row.pop("parts").items()}


def _conditions(filters: Sequence[Filter]) -> tuple[str, dict[str, Any]]:
    """Return the filters as SQL, and the values of its parameters."""
    parts = ["true"]
    values: dict[str, Any] = {}
    for number, one in enumerate(filters):
        if one.comparison not in COMPARISONS:
            raise DataError(f"{one.comparison!r} is not a comparison; use {' '.join(COMPARISONS)}")
        column, named = _column(one.column, f"part_{number}")
        value = one.value
        if one.column in (*NAMED, "prompt_id"):
            value = str(value)
        elif isinstance(value, str):
            raise DataError(f"{one.column} is compared with a number, got {value!r}")
        elif abs(value) >= MAX_INTEGER:
            value = float(value)
        parts.append(f"{column} {one.comparison} $value_{number}")
        values |= {**named, f"value_{number}": value}
    return " AND ".join(parts), values


def _column(name: str, parameter: str) -> tuple[str, dict[str, str]]:
    """Return a column as SQL, and the values of its parameters. Raises DataError if unknown."""
    if name.startswith(PART):
        return f"scalars.parts[${parameter}]", {parameter: name.removeprefix(PART)}
    if name not in COLUMNS or name == "parts":
        raise DataError(f"{name[:40]!r} is not a column of samples")
    return f'scalars."{name}"', {}
