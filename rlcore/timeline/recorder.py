"""Records the activities of each process of a run: spans, instants and counters.

A process has one recorder, `RECORDER`, which records nothing until `open`. Records stay in memory
until `flush` at the end of a step; files.py has their format.

    with RECORDER.span(("rank 0", "main"), "training"):
        ...

A track is a pair: a group (a rank, an engine, the reward workers) and a lane in it. Spans of a lane
nest; spans that may overlap, such as requests, get separate lanes from `TrackAllocator`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlcore.errors import DataError
from rlcore.timeline.files import Record, TimelineFile, Track

logger = logging.getLogger(__name__)

MAX_RECORDS = 200_000  # in memory, some 100 MB; further records are dropped and counted
# On Linux all processes of a machine share this clock.
now = time.perf_counter
GROUP: ContextVar[str] = ContextVar("GROUP", default="")
"""The group of samples that the current task works for, as `group_key` names it."""


def group_key(seed: int, draw: int) -> str:
    """Return the name of a group of samples; the seed distinguishes evaluation sets."""
    return f"{seed}/{draw}"


class Recorder:
    """Records spans; any thread and any task may call it.

    If the file cannot be written, recording stops with a warning, and the run continues.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.max_records = MAX_RECORDS
        # A deque's operations are atomic.
        self._records: deque[Record] = deque()
        self._lost = 0
        self._writing = threading.RLock()
        self._file: TimelineFile | None = None

    def open(self, folder: Path, process: str, *, limit_bytes: int) -> None:
        """Begin to record to `process`'s files in `folder`; a limit of 0 disables recording."""
        self.close()
        if limit_bytes > 0:
            self._file = TimelineFile(folder, process, limit_bytes=limit_bytes)
            self.enabled = True

    # --- records ----------------------------------------------------------------------------------

    def add(self, track: Track, name: str, began: float, ended: float, **args: Any) -> None:
        """Record a span between two times of `now`. `args` are JSON-able."""
        self._put("X", track, name, began, ended, args)

    def span(self, track: Track, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record the time of the block, even if it fails."""
        return _Span(self, track, name, args) if self.enabled else NOTHING

    def instant(self, track: Track, name: str, **args: Any) -> None:
        """Record a moment."""
        moment = now()
        self._put("i", track, name, moment, moment, args)

    def counter(self, group: str, name: str, value: float) -> None:
        """Record the new value of the counter `name`."""
        moment = now()
        self._put("C", (group, name), name, moment, moment, {"value": value})

    def _put(self, *record: *Record) -> None:
        if self.enabled and len(self._records) < self.max_records:
            self._records.append(record)
        elif self.enabled:
            self._lost += 1

    # --- files ------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Make void the records of steps after `step`, from which the run continues."""
        self._write(lambda file: file.begin(step))

    def flush(self, step: int) -> None:
        """Write the records since the last flush as those of `step`."""

        def write(file: TimelineFile) -> None:
            records = [self._records.popleft() for _ in range(len(self._records))]
            lost = self._lost
            self._lost -= lost
            file.append(step, records, lost=lost)

        self._write(write)

    def drop(self) -> None:
        """Drop the records since the last flush."""
        self._records.clear()

    def close(self) -> None:
        """Stop recording, and drop the records of an incomplete step."""
        with self._writing:
            self.enabled = False
            self._file = None
            self._records.clear()
            self._lost = 0

    def _write(self, write: Callable[[TimelineFile], None]) -> None:
        with self._writing:
            if self._file is None:
                return
            try:
                write(self._file)
            # Recovery: the run continues without a timeline. TypeError: half a surrogate pair in a
            # name, which no file can hold.
            except (OSError, DataError, TypeError) as error:
                logger.warning("the timeline is not recorded any more: %s", error)
                self.close()


RECORDER = Recorder()
NOTHING = nullcontext()


class _Span:
    """Records the time of a block, at a third of the cost of a generator."""

    __slots__ = ("_args", "_began", "_name", "_recorder", "_track")

    def __init__(self, recorder: Recorder, track: Track, name: str, args: dict[str, Any]) -> None:
        self._recorder = recorder
        self._track = track
        self._name = name
        self._args = args
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = now()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._args["failed"] = kind.__name__
        self._recorder.add(self._track, self._name, self._began, now(), **self._args)


class TrackAllocator:
    """Assigns lanes of a group to spans, so that overlapping spans get different lanes.

    Only for the tasks of one event loop.
    """

    def __init__(self, group: str, name: str) -> None:
        self.group = group
        self._name = name
        self._free: list[int] = []
        self._new = itertools.count()

    def take(self) -> int:
        """Return the lowest free lane."""
        return heapq.heappop(self._free) if self._free else next(self._new)

    def give_back(self, lane: int) -> None:
        """Free a lane."""
        heapq.heappush(self._free, lane)

    def track(self, lane: int) -> Track:
        """Return the track of a lane."""
        return (self.group, f"{self._name} {lane}")

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Record the time of the block on a free lane."""
        lane = self.take()
        try:
            with RECORDER.span(self.track(lane), name, **args):
                yield
        finally:
            self.give_back(lane)


def of_group() -> dict[str, str]:
    """Return the argument that names the group of samples of the current task."""
    group = GROUP.get()
    return {"group": group} if group else {}
