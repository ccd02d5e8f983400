"""The files of a timeline: runs/<name>/timeline/<process>.spans, written a step at a time.

A file is a list of chunks. A chunk is a line of JSON, its head, and as many bytes as the head says.
A head with `clock` begins a part of the file: it gives the clock of the process, and where the run
was resumed says that records of later steps than `after` that were written before are void. A head
with `step` has the records of one step, as JSON compressed by zstandard; nothing else need be read
to find a step. A file that is full becomes <process>.spans.1, over the one before. A kill may tear
the last chunk, which is cut off.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from rlcore.errors import DataError

FOLDER = "timeline"
SUFFIX = ".spans"
OLDER = ".spans.1"
LEVEL = 3
MOST_HEAD = 1 << 12  # bytes; a longer line is no head
MOST_CHUNK = 1 << 30  # bytes of a chunk's records
# kind ("X", "i" or "C"), track, name, begin and end (s of the process's clock), arguments
Record = tuple[str, tuple[str, str], str, float, float, dict[str, Any]]


@dataclass(frozen=True)
class Chunk:
    """A chunk of a file: its head, and where its records are."""

    head: dict[str, Any]
    offset: int
    size: int


class TimelineFile:
    """Writes the timeline of one process; makes nothing before the first chunk.

    Args:
        limit_bytes: of this file and the older one together.
    """

    def __init__(self, folder: Path, process: str, *, limit_bytes: int) -> None:
        self.path = folder / f"{process}{SUFFIX}"
        self._process = process
        self._limit = limit_bytes
        self._begun = False

    def begin(self, after: int | None = None) -> None:
        """Write the clock of a part of the file.

        Args:
            after: the step after which the run goes on; None: nothing written before is void.
        """
        self._begun = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_torn_chunk(self.path)
        mark = {} if after is None else {"after": after}
        self._append({**mark, "process": self._process, **clock()}, b"")

    def append(self, step: int, records: Sequence[Record], *, lost: int = 0) -> None:
        """Write the records of `step`."""
        if not self._begun:
            self.begin()
        tracks: dict[tuple[str, str], int] = {}
        rows = [
            (kind, tracks.setdefault(track, len(tracks)), name, began, ended, args)
            for kind, track, name, began, ended, args in records
        ]
        body = orjson.dumps({"tracks": list(tracks), "rows": rows}, default=str)
        packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(body)
        head = {"step": step, "records": len(rows), "written": time.time()}
        if lost:
            head["lost"] = lost
        self._append(head, packed)
        if self.path.stat().st_size > self._limit // 2:
            os.replace(self.path, self.path.with_name(f"{self._process}{OLDER}"))
            self._begun = False

    def _append(self, head: dict[str, Any], body: bytes) -> None:
        line = json.dumps(head | {"bytes": len(body)}).encode() + b"\n"
        with open(self.path, "ab") as file:
            file.write(line + body)


def clock() -> dict[str, Any]:
    """Return where this process's clock stands beside that of the wall.

    Processes of one boot share the clock, and so need no wall to be compared.
    """
    before = time.perf_counter()
    wall = time.time()
    after = time.perf_counter()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: each process has its own clock
        boot = f"{socket.gethostname()}/{os.getpid()}"
    return {
        "clock": (before + after) / 2,
        "wall": wall,
        "boot": boot,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def chunks(path: Path) -> Iterator[Chunk]:
    """Yield the whole chunks of a file, without their records.

    Raises:
        DataError: something else than a head stands where one is expected.
    """
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        while (head := _head(file, path)) is not None:
            offset = file.tell()
            size = head["bytes"]
            if offset + size > end:
                return
            yield Chunk(head, offset, size)
            file.seek(offset + size)


def records(path: Path, chunk: Chunk) -> list[Record]:
    """Read the records of a chunk.

    Raises:
        DataError: they are damaged.
    """
    with open(path, "rb") as file:
        file.seek(chunk.offset)
        packed = file.read(chunk.size)
    try:
        body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MOST_CHUNK)
        found = orjson.loads(body)
        tracks = [(str(group), str(lane)) for group, lane in found["tracks"]]
        return [
            (str(kind), tracks[track], str(name), float(began), float(ended), dict(args))
            for kind, track, name, began, ended, args in found["rows"]
        ]
    except (zstandard.ZstdError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{path}: the records of step {chunk.head.get('step')} are damaged ({error}); delete"
            " the file to see the rest of the timeline"
        ) from error


def _head(file: BinaryIO, path: Path) -> dict[str, Any] | None:
    """Read a head; None at the end, or where a kill tore it."""
    at = file.tell()
    line = file.readline(MOST_HEAD)
    if not line.endswith(b"\n") and len(line) < MOST_HEAD:
        return None
    try:
        head = json.loads(line)
        if isinstance(head, dict) and isinstance(head["bytes"], int) and head["bytes"] >= 0:
            return head
    except (ValueError, KeyError):
        pass
    raise DataError(f"{path}: byte {at} is no head of a timeline's chunk; delete the file")


def _cut_torn_chunk(path: Path) -> None:
    """Cut off what a kill tore; a file that is no timeline begins anew."""
    try:
        whole = max((chunk.offset + chunk.size for chunk in chunks(path)), default=0)
    except DataError:
        whole = 0
    if whole < path.stat().st_size:
        os.truncate(path, whole)
