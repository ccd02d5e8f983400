"""Reads recorded samples, and is the only place of this package that knows their file formats."""

from __future__ import annotations

import io
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import zstandard

from rlcore.errors import DataError
from rlcore.runs.directory import RECORDING
from rlcore.runs.sample_table import read_table

MOST_CACHED = 128 << 20  # bytes of decompressed steps that stay in memory
LONGEST_LINE = 256 << 20  # bytes of one sample: a file of zeros must not fill the memory
Record = dict[str, Any]
_Key = tuple[str, int, int]  # path, time of change, size


class RecordingReader:
    """Reads steps from their files: tables, and the JSON lines of earlier versions.

    The lines that were used last stay in memory, up to `most_cached` bytes.
    """

    def __init__(self, most_cached: int = MOST_CACHED) -> None:
        self.most_cached = most_cached
        self._cached: OrderedDict[_Key, list[bytes]] = OrderedDict()
        self._sizes: dict[_Key, int] = {}
        self._lock = threading.Lock()

    def records(self, path: Path, rows: Iterable[int]) -> dict[int, Record]:
        """Return the samples at these places in a recording; places that it lacks are left out.

        Raises:
            DataError: the file is missing or damaged.
        """
        if path.suffix == RECORDING:
            return dict(read_table(path, rows=rows))
        wanted = set(rows)
        last = max(wanted, default=-1)
        found: dict[int, Record] = {}
        for row, line in enumerate(self.lines(path)):
            if row in wanted:
                found[row] = parse(path, line)
            if row >= last:
                break
        return found

    def all(self, path: Path, columns: Sequence[str] | None = None) -> Iterator[Record]:
        """Yield all samples of a recording. Raises DataError as `records` does.

        Args:
            columns: what is needed of them; more may come. Default: everything.
        """
        if path.suffix == RECORDING:
            return (record for _, record in read_table(path, columns=columns))
        return (parse(path, line) for line in self.lines(path))

    def lines(self, path: Path) -> Iterator[bytes]:
        """Yield each sample as its JSON text, of a file of an earlier version."""
        key = _key_of(path)
        with self._lock:
            known = self._cached.get(key)
            if known is not None:
                self._cached.move_to_end(key)
        if known is not None:
            yield from known
            return
        kept: list[bytes] | None = []
        size = 0
        for line in _stream(path):
            size += len(line)
            if size > self.most_cached:
                kept = None
            elif kept is not None:
                kept.append(line)
            yield line
        if kept is not None:
            self._keep(key, kept, size)

    def _keep(self, key: _Key, lines: list[bytes], size: int) -> None:
        with self._lock:
            self._cached[key] = lines
            self._sizes[key] = size
            while sum(self._sizes.values()) > self.most_cached:
                oldest, _ = self._cached.popitem(last=False)
                del self._sizes[oldest]


def parse(path: Path, line: bytes) -> Record:
    """Parse a sample. Raises DataError where it is none."""
    try:
        record = orjson.loads(line)
    except ValueError:
        try:
            record = json.loads(line)  # knows NaN and integers of any size
        except ValueError as error:
            raise DataError(f"{path}: not a readable recording: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}: not a readable recording: a line is no object")
    return record


def _key_of(path: Path) -> _Key:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: not a readable recording: {error}") from error
    return str(path), found.st_mtime_ns, found.st_size


def _stream(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            buffered = io.BufferedReader(stream, 1 << 20)
            while line := buffered.readline(LONGEST_LINE):
                if not line.endswith(b"\n"):
                    raise DataError(f"{path}: not a readable recording: a line has no end")
                yield line
    except (OSError, zstandard.ZstdError) as error:
        raise DataError(f"{path}: not a readable recording: {error}") from error
