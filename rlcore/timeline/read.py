"""Reads the timeline of a run, of all its processes on one clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlcore.errors import DataError
from rlcore.timeline.files import FOLDER, OLDER, SUFFIX, Chunk, chunks, records

MAIN = re.compile(r"rank_0\.spans(\.1)?")  # the process whose steps all others are cut to
# A request may last over several steps, and is recorded with the step in which it ends.
LONGEST = 4


@dataclass(frozen=True)
class Span:
    """What was done on a track of the timeline.

    Attributes:
        kind: "X" a span, "i" a moment, "C" the value of a counter.
        group: a rank, an engine, the reward workers, ...
        lane: of the group; the spans of a lane nest.
        begin: seconds since the beginning of the `Timeline`.
        step: with which it was recorded.
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
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """The spans of some steps, by their begin.

    Attributes:
        wall: the time of the clock at its beginning, seconds since 1970.
        windows: of each step, from where rank 0 began to record it to where it had done so.
        lost: records for which there was no room in memory.
    """

    spans: list[Span]
    wall: float
    windows: dict[int, tuple[float, float]]
    lost: int = 0


@dataclass(frozen=True)
class _Part:
    """A chunk with the clock of its process."""

    path: Path
    chunk: Chunk
    clock: float
    wall: float
    boot: str

    @property
    def step(self) -> int:
        return int(self.chunk.head["step"])


def recorded_steps(run: Path) -> list[int]:
    """Return the steps of which rank 0 has a timeline, in order."""
    return sorted({part.step for part in _parts(run / FOLDER) if MAIN.fullmatch(part.path.name)})


def read_spans(run: Path, first: int | None = None, last: int | None = None) -> Timeline:
    """Read the timeline of steps `first` to `last`, by default all: what overlaps their time.

    Steps that a resumed run has made again are read as they were made last.

    Raises:
        DataError: there is none of these steps, or a file is damaged.
    """
    found = _parts(run / FOLDER)
    steps = sorted({part.step for part in found if MAIN.fullmatch(part.path.name)})
    wanted = [
        step
        for step in steps
        if (first is None or step >= first) and (last is None or step <= last)
    ]
    if not wanted:
        raise DataError(_none(run, steps))
    offsets, wall = _offsets(found)
    near = [part for part in found if wanted[0] - 1 <= part.step <= wanted[-1] + LONGEST]
    spans = [span for part in near for span in _spans(part, offsets[part.boot])]
    windows = _windows(spans, wanted)
    begin = min(window[0] for window in windows.values())
    end = max(window[1] for window in windows.values())
    chosen = [span for span in spans if span.begin < end and span.end > begin]
    origin = min(span.begin for span in chosen)  # of what had begun before the first step
    return Timeline(
        sorted((_moved(span, origin) for span in chosen), key=lambda s: (s.begin, -s.end)),
        origin + wall,
        {step: (a - origin, b - origin) for step, (a, b) in windows.items()},
        sum(part.chunk.head.get("lost", 0) for part in near),
    )


def _none(run: Path, steps: list[int]) -> str:
    if not (run / FOLDER).is_dir():
        return (
            f"{run} has no timeline ({run / FOLDER}): it is no run, or its tracking.timeline_mb is"
            " 0, or no step has ended"
        )
    has = f"it has steps {steps[0]} to {steps[-1]}" if steps else "no step has ended"
    return f"{run}: no timeline of these steps; {has}"


def _parts(folder: Path) -> list[_Part]:
    """Return the chunks with records that are not void, file by file.

    What rank 0 makes void is so in every file: a resumed run may have other processes.
    """
    marks: list[dict[str, Any]] = []
    found = list(_parts_by_file(folder, marks))
    return [
        part
        for part in found
        if not any(
            mark["after"] < part.step and part.chunk.head["written"] < mark["wall"]
            for mark in marks
        )
    ]


def _parts_by_file(folder: Path, marks: list[dict[str, Any]]) -> Iterator[_Part]:
    """Yield the chunks of each file that it does not call void itself.

    Args:
        marks: gets the heads of rank 0 with `after`.
    """
    names = {path.name.removesuffix(".1") for path in folder.glob(f"*{SUFFIX}*")}
    for name in sorted(name for name in names if name.endswith(SUFFIX)):
        kept: list[_Part] = []
        clock: dict[str, Any] = {}
        for path in (folder / f"{name.removesuffix(SUFFIX)}{OLDER}", folder / name):
            if not path.exists():
                continue
            for chunk in chunks(path):
                if "clock" in chunk.head:
                    clock = chunk.head
                if "after" in chunk.head:
                    if MAIN.fullmatch(path.name):
                        marks.append(clock)
                    kept = [part for part in kept if part.step <= clock["after"]]
                elif clock and "step" in chunk.head:
                    boot = str(clock["boot"])
                    kept.append(_Part(path, chunk, clock["clock"], clock["wall"], boot))
        yield from kept


def _offsets(parts: Sequence[_Part]) -> tuple[dict[str, float], float]:
    """Return of each boot what to add to its clock for rank 0's, and to that for the wall's.

    By the first part of each boot: the wall's clock may have been set since.
    """
    first: dict[str, _Part] = {}
    for part in parts:
        if part.boot not in first or part.clock < first[part.boot].clock:
            first[part.boot] = part
    main = next(part.boot for part in parts if MAIN.fullmatch(part.path.name))
    wall = first[main].wall - first[main].clock
    return {boot: part.wall - part.clock - wall for boot, part in first.items()}, wall


def _spans(part: _Part, offset: float) -> Iterator[Span]:
    for kind, (group, lane), name, began, ended, args in records(part.path, part.chunk):
        yield Span(kind, group, lane, name, began + offset, ended + offset, part.step, args)


def _windows(spans: Iterable[Span], steps: Iterable[int]) -> dict[int, tuple[float, float]]:
    windows: dict[int, tuple[float, float]] = {}
    wanted = set(steps)
    for span in spans:
        if span.group == "rank 0" and span.lane == "main" and span.step in wanted:
            begin, end = windows.get(span.step, (span.begin, span.end))
            windows[span.step] = (min(begin, span.begin), max(end, span.end))
    return windows


def _moved(span: Span, begin: float) -> Span:
    return replace(span, begin=span.begin - begin, end=span.end - begin)
