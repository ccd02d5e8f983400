"""Rows of JSONL and parquet files and of Hugging Face datasets, read one at a time from disk.

A bad row raises an error that names its file and line.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rlcore.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_ROWS = "JSONL or parquet, one row a prompt"
# Rows of an Arrow batch in the temporary file: reading a row reads its batch.
_BATCH_ROWS = 1024
_BOM = b"\xef\xbb\xbf"
# Digits that may be a whole number beyond 64 bits; inside a text they are allowed.
_LONG_NUMBER = re.compile(rb"(?<![\d.eE+])\d{19,}(?![\d.eE])")


class RowFile:
    """The rows of one file, with random access; few rows are in memory at a time."""

    # Whether missing fields are nulls, as in parquet: each row has every field of the schema.
    fills_with_null = False

    def __init__(self, name: object) -> None:
        self._name = name

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read row `index`. Raises DataError if it is not a JSON object."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Read all rows, in order."""
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """Return "file:line" of a row; in parquet "file:row", counted from 1."""
        return f"{self._name}:{index + 1}"


def open_rows(path: Path) -> RowFile:
    """Open one file. Raises DataError if it is unreadable; a bad row fails when it is read."""
    check_file(path)
    try:
        return ParquetRows(path) if path.suffix == ".parquet" else JsonRows(path)
    except OSError as error:
        many = error.errno == errno.EMFILE
        advice = "; raise the limit (ulimit -n), or join the shards into fewer files" * many
        raise DataError(f"{path}: cannot be opened: {error.strerror}{advice}") from error


def check_file(path: Path) -> None:
    """Refuse a missing, empty or unknown kind of file (DataError); reads nothing."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; expected {_ROWS}")
    if path.suffix not in (".parquet", *JSONL_SUFFIXES):
        raise DataError(
            f"{path} has the suffix {path.suffix!r}; known are .parquet,"
            f" {', '.join(JSONL_SUFFIXES)}"
        )
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} may not be read by the user who starts this; expected {_ROWS}")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty; expected {_ROWS}")


class JsonRows(RowFile):
    """A file with one JSON object a line; only the lines' offsets are in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Not closed at the end of a block: the file serves reads as long as the prompts live.
        self._file = path.open("rb")
        starts = array("q", [0])
        # Blank lines at the end of the file are not rows.
        blank_from = 0
        for number, line in enumerate(self._file, start=1):
            starts.append(starts[-1] + len(line))
            if line.strip() and line != _BOM:
                blank_from = number
        self._starts: NDArray[np.int64] = np.frombuffer(starts, np.int64)[: blank_from + 1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        start = int(self._starts[index])
        line = os.pread(self._file.fileno(), int(self._starts[index + 1]) - start, start)
        line = line.removeprefix(_BOM).rstrip() if index == 0 else line.rstrip()
        where = self.where(index)
        if _LONG_NUMBER.search(line) and (number := _long_number(line)):
            raise DataError(
                f"{where}: {shorten(number)} does not fit into 64 bits, and would be rounded: write"
                " it as text"
            )
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            # orjson counts lines inside the row too; only the column is meaningful to the reader.
            reason = re.sub(r": line \d+ column (\d+) \(char \d+\)", r" at column \1", str(error))
            text = shorten(line.decode(errors="replace"))
            raise DataError(
                f"{where}: not JSON ({reason}), expected one object a line: {text!r}"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{where}: expected a JSON object, got {type(row).__name__}: {shorten(row)}"
            )
        return row


def _long_number(line: bytes) -> str:
    """Return a whole number beyond 64 bits, which orjson reads as the next float; "" if none."""
    found: list[str] = []

    def whole(text: str) -> int:
        if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
            found.append(text)
        return 0

    # A line that is not JSON is reported later.
    with suppress(ValueError, RecursionError):
        json.loads(line, parse_int=whole)
    return found[0] if found else ""


class ParquetRows(RowFile):
    """A parquet file, with an uncompressed, memory-mapped copy in an unnamed file.

    Parquet itself does not give single rows, only row groups of up to about a million.
    """

    fills_with_null = True

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        super().__init__(path)
        starts = [0]
        # TMPDIR sets the folder. The mapping keeps the unnamed file alive after the block.
        with tempfile.NamedTemporaryFile(prefix="rlcore-rows-") as copy:
            try:
                # pre_buffer would hold a whole compressed row group next to its decoded part.
                with (
                    pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file,
                    pyarrow.ipc.new_file(copy, file.schema_arrow) as writer,
                ):
                    for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                        writer.write_batch(batch)
                        starts.append(starts[-1] + batch.num_rows)
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{path}: not a readable parquet file after row {starts[-1]}, or no room for"
                    f" its copy in {tempfile.gettempdir()} (TMPDIR): {error}"
                ) from error
            copy.flush()
            self._batches = pyarrow.ipc.open_file(pyarrow.memory_map(copy.name))
        self._starts: NDArray[np.int64] = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        rows = self._batches.get_batch(batch).slice(index - int(self._starts[batch]), 1)
        return self._plain(rows, index)[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in range(len(self._starts) - 1):
            yield from self._plain(self._batches.get_batch(batch), int(self._starts[batch]))

    def _plain(self, rows: Any, first: int) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = rows.to_pylist()
        except UnicodeDecodeError as error:
            where = self.where(first) + (f" to {first + len(rows)}" if len(rows) > 1 else "")
            raise DataError(f"{where}: a text that is not UTF-8: {error}") from error
        return found


def pick(row: dict[str, Any], key: str) -> Any:
    """Return the value at a key, which may be dotted to reach into columns. Raises KeyError.

    A column whose own name has dots takes precedence.
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[part]
    return value


def has(row: dict[str, Any], key: str) -> bool:
    """Whether a dotted key has a value other than null."""
    try:
        return pick(row, key) is not None
    except KeyError:
        return False


def without_nulls(value: Any) -> Any:
    """Return the value without null fields, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def shorten(value: Any) -> str:
    """Return at most 80 characters of a value, for messages."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
