"""The files of a timeline: timeline/<process>.json.gz, events in Chrome's trace-event format.

Unpacked, a file is an array of events without its closing bracket, as Perfetto and chrome://tracing
accept it. They read only the first member of a gzip file, so it must be unpacked. A process appends
its events as one gzip member per step. An extra field in the member's header has its size and step,
so a reader unpacks only the steps that it wants. The next start cuts off an incomplete member. A
member without events makes void the earlier records of steps after its own. A full file becomes
<process>.older.json.gz, in place of the previous one.

Times are of the wall clock, in microseconds.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from rlcore.errors import DataError

FOLDER = "timeline"
MAIN = "rank_0"  # the process whose steps bound those of all others
# The display order of groups of tracks, by the beginning of their names.
ORDER = ("rank ", "publication", "rollouts", "engine ", "tools", "rewards")
# A request may span several steps, and is recorded with the step in which it ends.
MAX_STEPS_OF_A_REQUEST = 4
# A gzip header (RFC 1952) whose extra field "rl" holds: bytes of the member, time of writing,
# step, records that were lost, and whether later steps are void.
HEADER = struct.Struct("<4sIBBH2sHIqqI?")
MAGIC = b"\x1f\x8b\x08\x04"
LEVEL = 1
MAX_BYTES = 1 << 30  # of a step's events, lest a damaged file fill the memory
Track = tuple[str, str]
Event = dict[str, Any]
# Kind ("X", "i" or "C"), track, name, begin and end (s of the process's clock), arguments.
Record = tuple[str, Track, str, float, float, dict[str, Any]]


@dataclass(frozen=True)
class Span:
    """An event on a track of the timeline.

    Attributes:
        kind: "X" a span, "i" a moment, "C" the value of a counter.
        group: a rank, an engine, the reward workers, ...
        lane: a track of the group; the spans of a lane nest.
        begin: seconds since the beginning of the `Timeline`.
        step: the step with which it was recorded.
    """

    kind: str
    group: str
    lane: str
    name: str
    begin: float
    end: float
    step: int
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """The spans of some steps, ordered by begin.

    Attributes:
        windows: for each step, the times between which rank 0 recorded it.
        lost: the number of records for which there was no room in memory.
    """

    spans: list[Span]
    windows: dict[int, tuple[float, float]]
    lost: int = 0


# --- writing --------------------------------------------------------------------------------------


class TimelineFile:
    """Writes the timeline of one process; creates no file before the first event.

    Args:
        limit_bytes: the limit on this file and the older file together.
    """

    def __init__(self, folder: Path, process: str, *, limit_bytes: int) -> None:
        self.path = folder / f"{process}.json.gz"
        self._older = folder / f"{process}.older.json.gz"
        self._limit = limit_bytes
        self._begun = False
        self._offset = time.time() - time.perf_counter()

    def begin(self, after: int) -> None:
        """Make void the records of steps after `after`, from which the run continues."""
        self._append(b"", after, voids=True)

    def append(self, step: int, records: Sequence[Record], *, lost: int = 0) -> None:
        """Write the records of `step`."""
        tracks = {record[1]: _numbers(record[1]) for record in records}
        events = [*_names(tracks)]
        for kind, track, name, began, ended, args in records:
            pid, tid = tracks[track]
            begin = self._microseconds(began)
            event = {"name": name, "ph": kind, "pid": pid, "tid": tid, "ts": begin, "args": args}
            if kind == "X":
                event["dur"] = self._microseconds(ended) - begin
            elif kind == "i":
                event["s"] = "t"
            events.append(event)
        content = orjson.dumps(events, default=str)[1:-1]
        self._append(content and content + b",\n", step, lost=lost)
        if self.path.stat().st_size > self._limit // 2:
            os.replace(self.path, self._older)
            self._begun = False

    def _append(self, content: bytes, step: int, *, lost: int = 0, voids: bool = False) -> None:
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                ends = [member.begin + member.size for member in members(self.path)]
                os.truncate(self.path, max(ends, default=0))
            self._begun = True
        with open(self.path, "ab") as file:
            content = content if file.tell() else b"[\n" + content
            packer = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS)
            packed = packer.compress(content) + packer.flush()
            end = struct.pack("<II", zlib.crc32(content), len(content))
            size = HEADER.size + len(packed) + len(end)
            extra = HEADER.size - 12
            ours = (b"rl", extra - 4, size, self._microseconds(time.perf_counter()), step)
            header = HEADER.pack(MAGIC, 0, 0, 255, extra, *ours, lost, voids)
            file.write(header + packed + end)

    def _microseconds(self, clock: float) -> int:
        # Rounded times nest as the spans do.
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
    """Return the ids of a group and a track, the same in the files of all processes."""
    group = zlib.crc32(track[0].encode(errors="replace")) >> 1
    return group or 1, zlib.crc32("/".join(track).encode(errors="replace")) >> 1 or 1


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A step's records in the file of a process, or the mark that later steps are void.

    Attributes:
        begin, size: the offset and size in the file, in bytes.
        at: the time of writing, in microseconds.
    """

    path: Path
    begin: int
    size: int
    at: int
    step: int
    lost: int
    voids: bool

    @property
    def process(self) -> str:
        """The process that wrote the member."""
        return self.path.name.partition(".")[0]


def members(path: Path) -> Iterator[Member]:
    """Yield the complete members of a file, in order.

    Raises:
        DataError: the file holds other content.
    """
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        begin = 0
        while begin + HEADER.size <= length:
            file.seek(begin)
            magic, *_, mark, _, size, at, step, lost, voids = HEADER.unpack(file.read(HEADER.size))
            if magic != MAGIC or mark != b"rl" or size <= HEADER.size:
                raise DataError(f"{path}: no step of a timeline at byte {begin}; delete the file")
            if begin + size > length:
                return
            yield Member(path, begin, size, at, step, lost, voids)
            begin += size


def events(member: Member) -> list[Event]:
    """Read the events of a step.

    Raises:
        DataError: the events are damaged.
    """
    with open(member.path, "rb") as file:
        file.seek(member.begin)
        packed = file.read(member.size)
    try:
        unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        content = unpacker.decompress(packed, MAX_BYTES)
        if not unpacker.eof:
            raise ValueError("no end")
        found: list[Event] = orjson.loads(b"[" + content.strip(b"[,\n") + b"]")
        return found
    except (ValueError, zlib.error) as error:
        raise DataError(
            f"{member.path}: the records of step {member.step} are damaged ({error}); delete the"
            " file to see the rest of the timeline"
        ) from error


def recorded_steps(run: Path) -> list[int]:
    """Return the steps that rank 0 has recorded, in order."""
    return _steps(_valid_members(run / FOLDER))


def _steps(found: Iterable[Member]) -> list[int]:
    return sorted({member.step for member in found if member.process == MAIN})


def read_spans(run: Path, first: int | None = None, last: int | None = None) -> Timeline:
    """Read the spans that overlap steps `first` to `last`, by default all steps.

    Of a step that a resumed run has repeated, the last records count.

    Raises:
        DataError: there is no timeline of these steps, or a file is damaged.
    """
    found = _valid_members(run / FOLDER)
    steps = _steps(found)
    wanted = [s for s in steps if (first is None or s >= first) and (last is None or s <= last)]
    if not wanted:
        if not (run / FOLDER).is_dir():
            raise DataError(
                f"{run} has no timeline ({run / FOLDER}): it is not a run, or its"
                " tracking.timeline_mb is 0, or no step has ended"
            )
        has = f"it has steps {steps[0]} to {steps[-1]}" if steps else "no step has ended"
        raise DataError(f"{run}: no timeline of these steps; {has}")
    longest = wanted[-1] + MAX_STEPS_OF_A_REQUEST
    near = [member for member in found if wanted[0] - 1 <= member.step <= longest]
    spans = [span for member in near for span in _spans(member)]
    windows: dict[int, tuple[float, float]] = {}
    chosen_steps = set(wanted)
    for span in spans:
        if (span.group, span.lane) == ("rank 0", "main") and span.step in chosen_steps:
            begin, end = windows.get(span.step, (span.begin, span.begin + 1))
            windows[span.step] = (min(begin, span.begin), max(end, span.end))
    begin = min(window[0] for window in windows.values())
    end = max(window[1] for window in windows.values())
    # A span shorter than a microsecond counts as one.
    chosen = [s for s in spans if s.begin < end and max(s.end, s.begin + 1) > begin]
    # Some spans began before the first step.
    origin = min(span.begin for span in chosen)
    moved = [replace(s, begin=(s.begin - origin) / 1e6, end=(s.end - origin) / 1e6) for s in chosen]
    return Timeline(
        sorted(moved, key=lambda span: (span.begin, -span.end)),
        {step: ((a - origin) / 1e6, (b - origin) / 1e6) for step, (a, b) in windows.items()},
        sum(member.lost for member in near),
    )


def _valid_members(folder: Path) -> list[Member]:
    """Return the valid members, file by file.

    Rank 0 makes steps void in every file, as a resumed run may have other processes.
    """
    found: list[Member] = []
    resumed: list[Member] = []
    for process in sorted({path.name.partition(".")[0] for path in folder.glob("*.json.gz")}):
        kept: list[Member] = []
        for path in (folder / f"{process}.older.json.gz", folder / f"{process}.json.gz"):
            for member in members(path) if path.exists() else ():
                if not member.voids:
                    kept.append(member)
                    continue
                kept = [one for one in kept if one.step <= member.step]
                resumed += [member] if process == MAIN else []
        found += kept
    return [one for one in found if not any(one.step > m.step and one.at < m.at for m in resumed)]


def _spans(member: Member) -> Iterator[Span]:
    """Yield the spans of one process in a step, with times in microseconds."""
    groups: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    try:
        for event in events(member):
            pid = event["pid"]
            tid = event["tid"]
            if event["name"] == "process_name" and event["ph"] == "M":
                groups[pid] = str(event["args"]["name"])
            elif event["name"] == "thread_name" and event["ph"] == "M":
                lanes[pid, tid] = str(event["args"]["name"])
            elif event["ph"] != "M":
                begin = int(event["ts"])
                where = (event["ph"], groups[pid], lanes[pid, tid], str(event["name"]), begin)
                yield Span(*where, begin + event.get("dur", 0), member.step, dict(event["args"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{member.path}: step {member.step}: no event: {error!r}") from error
