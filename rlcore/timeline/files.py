"""The files of a timeline: timeline/<process>.json, events in Chrome's trace-event format.

Perfetto and chrome://tracing read a file as it is: an array of events, one a line, which needs no
closing bracket. A process appends its events a step at a time; after them comes a mark, an instant
event that gives the step. What follows the last mark was torn by a kill and is cut off at the next
start. A mark `resumed` says that steps after `after` that were recorded before are void. A full
file becomes <process>.older.json, over the one before.

Times are of the wall clock, in microseconds.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rlcore.errors import DataError

FOLDER = "timeline"
# Groups of tracks in the order in which they are shown, by how their names begin.
ORDER = ("rank ", "publication", "rollouts", "engine ", "tools", "rewards")
# Other events begin with their name, so that no name can be taken for a mark.
MARK = re.compile(rb'\n(\{"ph":"i","s":"p"[^\n]*),(?=\n)')
Track = tuple[str, str]
Event = dict[str, Any]
# kind ("X", "i" or "C"), track, name, begin and end (s of the process's clock), arguments
Record = tuple[str, Track, str, float, float, dict[str, Any]]


@dataclass(frozen=True)
class Mark:
    """Ends the events of a step (`step`), or makes later steps void (`after`).

    Attributes:
        at: when it was written, in microseconds.
        begin, end: where the step's events lie in the file, in bytes.
    """

    path: Path
    at: int
    begin: int
    end: int
    step: int | None = None
    after: int | None = None
    lost: int = 0


class TimelineFile:
    """Writes the timeline of one process; makes nothing before the first event.

    Args:
        limit_bytes: of this file and the older one together.
    """

    def __init__(self, folder: Path, process: str, *, limit_bytes: int) -> None:
        self.path = folder / f"{process}.json"
        self._process = process
        self._limit = limit_bytes
        self._begun = False
        self._offset = time.time() - time.perf_counter()

    def begin(self, after: int) -> None:
        """Mark what was recorded of steps after `after` as void: the run goes on from there."""
        self._append([self._mark("resumed", after=after)])

    def append(self, step: int, records: Sequence[Record], *, lost: int = 0) -> None:
        """Write the records of `step`."""
        tracks = {track: _numbers(track) for _, track, *_ in records}
        named = _names(tracks)
        recorded = (self._event(record, tracks[record[1]]) for record in records)
        self._append([*named, *recorded, self._mark("recorded", step=step, lost=lost)])
        if self.path.stat().st_size > self._limit // 2:
            os.replace(self.path, self.path.with_name(f"{self._process}.older.json"))
            self._begun = False

    def _append(self, events: Iterable[Event]) -> None:
        content = b"".join(orjson.dumps(event, default=str) + b",\n" for event in events)
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_step(self.path)
            self._begun = True
        with open(self.path, "ab") as file:
            file.write(content if file.tell() else b"[\n" + content)

    def _event(self, record: Record, numbers: tuple[int, int]) -> Event:
        kind, _, name, began, ended, args = record
        pid, tid = numbers
        begin = self._microseconds(began)
        event = {"name": name, "ph": kind, "pid": pid, "tid": tid, "ts": begin, "args": args}
        if kind == "X":
            event["dur"] = self._microseconds(ended) - begin
        elif kind == "i":
            event["s"] = "t"
        return event

    def _mark(self, name: str, **args: int) -> Event:
        pid, tid = _numbers((self._process.replace("_", " "), "marks"))
        now = self._microseconds(time.perf_counter())
        where = {"pid": pid, "tid": tid, "ts": now}
        return {"ph": "i", "s": "p", "name": name, **where, "args": args}

    def _microseconds(self, clock: float) -> int:
        # whole numbers nest as the spans do
        return round((clock + self._offset) * 1e6)


def _names(tracks: Mapping[Track, tuple[int, int]]) -> Iterator[Event]:
    """Yield the metadata events that name the tracks, and order their groups."""
    groups: set[str] = set()
    for (group, lane), (pid, tid) in tracks.items():
        common = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
        if group not in groups:
            groups.add(group)
            yield {"name": "process_name", **common, "args": {"name": group}}
            at = next((at for at, start in enumerate(ORDER) if group.startswith(start)), len(ORDER))
            yield {"name": "process_sort_index", **common, "args": {"sort_index": at}}
        yield {"name": "thread_name", **common, "args": {"name": lane}}


def _numbers(track: Track) -> tuple[int, int]:
    """Return the numbers of a group and a track, the same in the files of all processes."""
    group = zlib.crc32(track[0].encode(errors="replace")) >> 1
    return group or 1, zlib.crc32("/".join(track).encode(errors="replace")) >> 1 or 1


def marks(path: Path) -> Iterator[Mark]:
    """Yield the marks of a file, in order.

    Raises:
        DataError: a mark makes no sense.
    """
    content = path.read_bytes()
    begin = 0
    for match in MARK.finditer(content):
        try:
            event = orjson.loads(match[1])
            mark = Mark(path, int(event["ts"]), begin, match.start(), **event["args"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: byte {match.start()} is no mark; delete the file") from error
        yield mark
        begin = match.end() + 1


def events(mark: Mark) -> list[Event]:
    """Read the events of a step.

    Raises:
        DataError: they are damaged.
    """
    with open(mark.path, "rb") as file:
        file.seek(mark.begin)
        lines = file.read(mark.end - mark.begin)
    try:
        found = orjson.loads(b"[" + lines.strip(b"[,\n") + b"]")
        return [event for event in found if isinstance(event, dict)]
    except ValueError as error:
        raise DataError(
            f"{mark.path}: the records of step {mark.step} are damaged ({error}); delete the file"
            " to see the rest of the timeline"
        ) from error


def _cut_torn_step(path: Path) -> None:
    """Cut off what follows the last mark."""
    if path.exists():
        found = [*MARK.finditer(path.read_bytes())]
        os.truncate(path, found[-1].end() + 1 if found else 0)
