"""Reads the timeline of a run, of all its processes on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlcore.errors import DataError
from rlcore.timeline.files import FOLDER, Mark, events, marks

MAIN = "rank_0"  # the process whose steps all others are cut to
# A request may last over several steps, and is recorded with the step in which it ends.
MAX_STEPS_OF_A_REQUEST = 4


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
        windows: of each step, from where rank 0 began to record it to where it had done so.
        lost: records for which there was no room in memory.
    """

    spans: list[Span]
    windows: dict[int, tuple[float, float]]
    lost: int = 0


def recorded_steps(run: Path) -> list[int]:
    """Return the steps of which rank 0 has a timeline, in order."""
    return _steps_of_main(_valid_marks(run / FOLDER))


def read_spans(run: Path, first: int | None = None, last: int | None = None) -> Timeline:
    """Read the timeline of steps `first` to `last`, by default all: what overlaps their time.

    Steps that a resumed run has made again are read as they were made last.

    Raises:
        DataError: there is none of these steps, or a file is damaged.
    """
    found = _valid_marks(run / FOLDER)
    steps = _steps_of_main(found)
    wanted = [
        step
        for step in steps
        if (first is None or step >= first) and (last is None or step <= last)
    ]
    if not wanted:
        raise DataError(_none(run, steps))
    near = [
        (step, mark)
        for step, mark in found
        if wanted[0] - 1 <= step <= wanted[-1] + MAX_STEPS_OF_A_REQUEST
    ]
    spans = [span for step, mark in near for span in _spans(step, mark)]
    windows = _windows(spans, wanted)
    begin = min(window[0] for window in windows.values())
    end = max(window[1] for window in windows.values())
    # what takes no whole microsecond takes one
    chosen = [s for s in spans if s.begin < end and max(s.end, s.begin + 1) > begin]
    # of what had begun before the first step
    origin = min(span.begin for span in chosen)
    moved = [replace(s, begin=(s.begin - origin) / 1e6, end=(s.end - origin) / 1e6) for s in chosen]
    return Timeline(
        sorted(moved, key=lambda span: (span.begin, -span.end)),
        {step: ((a - origin) / 1e6, (b - origin) / 1e6) for step, (a, b) in windows.items()},
        sum(mark.lost for _, mark in near),
    )


def _none(run: Path, steps: list[int]) -> str:
    if not (run / FOLDER).is_dir():
        return (
            f"{run} has no timeline ({run / FOLDER}): it is no run, or its tracking.timeline_mb is"
            " 0, or no step has ended"
        )
    has = f"it has steps {steps[0]} to {steps[-1]}" if steps else "no step has ended"
    return f"{run}: no timeline of these steps; {has}"


def _steps_of_main(found: Iterable[tuple[int, Mark]]) -> list[int]:
    return sorted({step for step, mark in found if _process(mark.path) == MAIN})


def _process(path: Path) -> str:
    return path.name.removesuffix(".json").removesuffix(".older")


def _valid_marks(folder: Path) -> list[tuple[int, Mark]]:
    """Return steps with their marks, file by file, without those that are void.

    What rank 0 makes void is so in every file: a resumed run may have other processes.
    """
    found: list[tuple[int, Mark]] = []
    resumed: list[tuple[int, int]] = []
    for process in sorted({_process(path) for path in folder.glob("*.json")}):
        kept: list[tuple[int, Mark]] = []
        for path in (folder / f"{process}.older.json", folder / f"{process}.json"):
            for mark in marks(path) if path.exists() else ():
                if mark.step is not None:
                    kept.append((mark.step, mark))
                elif mark.after is not None:
                    after = mark.after
                    kept = [one for one in kept if one[0] <= after]
                    resumed += [(after, mark.at)] if process == MAIN else []
        found += kept
    return [
        (step, mark)
        for step, mark in found
        if not any(step > after and mark.at < at for after, at in resumed)
    ]


def _spans(step: int, mark: Mark) -> Iterator[Span]:
    """Yield the spans of a step of one process, with times in microseconds."""
    groups: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    try:
        for event in events(mark):
            pid = event["pid"]
            tid = event["tid"]
            if event["name"] == "process_name" and event["ph"] == "M":
                groups[pid] = str(event["args"]["name"])
            elif event["name"] == "thread_name" and event["ph"] == "M":
                lanes[pid, tid] = str(event["args"]["name"])
            elif event["ph"] != "M":
                begin = int(event["ts"])
                end = begin + int(event.get("dur", 0))
                where = (groups[pid], lanes[pid, tid])
                yield Span(
                    event["ph"], *where, str(event["name"]), begin, end, step, dict(event["args"])
                )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{mark.path}: step {step} has an event that is none: {error!r}") from error


def _windows(spans: Iterable[Span], steps: Iterable[int]) -> dict[int, tuple[float, float]]:
    windows: dict[int, tuple[float, float]] = {}
    wanted = set(steps)
    for span in spans:
        if span.group == "rank 0" and span.lane == "main" and span.step in wanted:
            begin, end = windows.get(span.step, (span.begin, span.begin + 1))
            windows[span.step] = (min(begin, span.begin), max(end, span.end))
    return windows
