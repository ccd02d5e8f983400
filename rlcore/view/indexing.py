"""The scalars of a run's samples: by the index that the run keeps, and one of this user's own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcore.errors import DataError
from rlcore.runs.sample_index import JOURNAL, IndexWriter, SampleIndex, scalars_of
from rlcore.view.query import Place, Span, spans_of
from rlcore.view.reader import RecordingReader

logger = logging.getLogger(__name__)

REFRESH_S = 1.0  # files are looked at no oftener
SHOWN_EVERY = 20  # steps that are indexed before they are shown
_Failed = set[tuple[int, int]]  # steps, and sizes of their recordings, that cannot be read


class RunIndex:
    """Finds the scalars of each step: the run's own index counts first.

    What it lacks, as of a run that was recorded before there were indexes, is indexed in `cache`.

    Args:
        own: the run's own index, which is only read.
        cache: a folder of this user, made as it is needed.
        recordings: returns the recordings of steps that are on the disk.
        inside: refuses a path that leads out of the run.
    """

    def __init__(
        self,
        own: Path,
        cache: Path,
        *,
        recordings: Callable[[], dict[int, Path]],
        inside: Callable[[Path], Path],
    ) -> None:
        self._recordings = recordings
        self._inside = inside
        self._own = SampleIndex(own)
        self._cached = SampleIndex(cache)
        self._lock = threading.Lock()
        self._refreshed = -REFRESH_S
        self._marks: tuple[int, ...] = ()
        self._changed: set[int] = set()  # steps that are recorded anew since the run indexed them
        self._sizes: dict[int, int] = {}  # of the recordings, as they were looked at last
        self._owners: dict[int, SampleIndex] = {}  # by step
        self._steps: list[int] = []
        self._spans: list[Span] = []

    def steps(self) -> list[int]:
        """Return the steps with scalars, in order."""
        self.refresh()
        return self._steps

    def spans(self) -> list[Span]:
        """Return where the scalars of all steps are, newest first."""
        self.refresh()
        return self._spans

    def spans_between(self, first: int, last: int) -> list[Span]:
        """Return where the scalars of steps `first` to `last` are."""
        self.refresh()
        with self._lock:
            if self._steps and first <= self._steps[0] and self._steps[-1] <= last:
                return self._spans
            chosen = [step for step in reversed(self._steps) if first <= step <= last]
            return spans_of([(step, self._owners[step]) for step in chosen])

    def scalars(self, places: list[Place]) -> list[dict[str, Any]]:
        """Return the scalars of samples, with names in the place of their numbers.

        Raises:
            DataError: a sample is gone, since the run was rewound.
        """
        return [self._row(place) for place in places]

    def _row(self, place: Place) -> dict[str, Any]:
        index = self._owners.get(place.step)
        block = None if index is None else index.blocks.get(place.step)
        if index is None or block is None or not 0 <= place.row < block.rows:
            raise DataError(f"step {place.step} has no sample {place.row} (any more)")
        found: dict[str, Any] = {"step": place.step, "row": place.row}
        for name in index.columns:
            if name == "prompt":  # 64 bits, which JavaScript would round
                continue
            value = index.column(name)[block.first + place.row].item()
            if name in index.names:
                names = index.names[name]
                value = names[value] if value < len(names) else "?"
            found[name] = value
        return found

    def columns(self) -> dict[str, list[str]]:
        """Return the columns that can be asked for; those of names with their names."""
        self.refresh()
        found: dict[str, list[str]] = {}
        for index in (self._own, self._cached):
            for name in index.columns:
                known = found.setdefault(name, [])
                known += [text for text in index.names.get(name, []) if text not in known]
        return found

    def refresh(self, *, now: bool = False) -> None:
        """Look at the indexes again, unless that was done a moment ago."""
        with self._lock:
            if not now and time.monotonic() - self._refreshed < REFRESH_S:
                return
            is_first = not self._marks
            self._refresh_own(is_first)
            self._cached.refresh()
            if is_first and self._cached.blocks:
                self._look_at_recordings()
            marks = (
                *(len(self._own.blocks), self._own.end, len(self._cached.blocks), self._cached.end),
                *(len(self._changed), len(self._sizes)),
            )
            if marks != self._marks:
                self._marks = marks
                self._assign()
            self._refreshed = time.monotonic()

    def _refresh_own(self, is_first: bool) -> None:
        try:
            self._inside(self._own.folder / JOURNAL)
            self._own.refresh()
            if is_first:
                self._changed |= {*self._own.damaged()}
        # recovery: the samples are indexed in the cache
        except DataError as error:
            logger.warning("%s", error)
            self._own = SampleIndex(self._own.folder / "unreadable")

    def _assign(self) -> None:
        """Give each step to the index that knows it as it is recorded."""
        cached = self._cached.blocks
        owners = {
            step: self._cached
            for step, size in self._sizes.items()
            if step in cached and cached[step].file_bytes == size
        }
        owners |= {step: self._own for step in self._own.blocks if step not in self._changed}
        self._owners = owners
        self._steps = sorted(owners)
        self._spans = spans_of([(step, owners[step]) for step in reversed(self._steps)])

    def _look_at_recordings(self) -> None:
        self._sizes = {step: path.stat().st_size for step, path in self._recordings().items()}
        own = self._own.blocks
        for step, size in self._sizes.items():
            if step in own and own[step].file_bytes != size:
                self._changed.add(step)

    def lacking(self) -> list[int]:
        """Return recorded steps that no index knows as they are, newest first."""
        self.refresh(now=True)
        with self._lock:
            self._look_at_recordings()
            self._assign()
            return [step for step in reversed(self._sizes) if step not in self._owners]


class Indexer:
    """Indexes what the run's own index lacks, in a thread, into a folder of this user.

    Args:
        recordings: the folder whose change says that there is something to look for.
        recording: returns the file of a step.
    """

    def __init__(
        self,
        index: RunIndex,
        cache: Path,
        *,
        reader: RecordingReader,
        recordings: Path,
        recording: Callable[[int], Path],
    ) -> None:
        self.index = index
        self.cache = cache
        self.done = 0
        self.lacking = 0
        self.trouble = ""
        self._reader = reader
        self._recordings = recordings
        self._recording = recording
        self._failed: _Failed = set()
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin; the thread ends with the process."""
        threading.Thread(target=self._work, name="indexer", daemon=True).start()

    def stop(self) -> None:
        """End after the step at hand."""
        self._stop.set()

    def index_now(self, step: int) -> None:
        """Index a step, unless it is known."""
        if step in self.index.lacking():
            self._add([step])

    def _work(self) -> None:
        seen = None
        while not self._stop.is_set():
            try:
                mark = self._mark()
                if mark != seen:  # thousands of files are looked at only where one has changed
                    self._catch_up()
                    seen = mark
            except (OSError, DataError) as error:
                self.trouble = str(error)
            self._stop.wait(REFRESH_S)

    def _mark(self) -> int:
        """Return when a recording was last made, renamed or deleted; 0 without any."""
        try:
            return self._recordings.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _catch_up(self) -> None:
        steps = self.index.lacking()
        self.lacking = len(steps)
        self.done = 0
        self._add(steps)
        self.lacking = self.done = 0

    def _add(self, steps: Iterable[int]) -> None:
        """Index steps, unless another process is at it."""
        if not steps:
            return
        with only_writer(self.cache) as alone:
            if not alone:
                self.trouble = "another rlcore view indexes this run"
                return
            writer = IndexWriter(self.cache)
            for step in steps:
                if self._stop.is_set():
                    break
                self._add_step(writer, step)
                self.done += 1
                if self.done % SHOWN_EVERY == 0:
                    self.index.refresh(now=True)
        self.index.refresh(now=True)

    def _add_step(self, writer: IndexWriter, step: int) -> None:
        path = self._recording(step)
        mark = (step, path.stat().st_size)
        if mark in self._failed:
            return
        try:
            samples = [scalars_of(record) for record in self._reader.all(path)]
            writer.append(step, mark[1], samples)
        except (DataError, ValueError, TypeError, KeyError, OverflowError) as error:
            self._failed.add(mark)
            self.trouble = f"step {step}: {error}"


@contextmanager
def only_writer(folder: Path) -> Iterator[bool]:
    """Enter with whether no other process indexes into a folder."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except OSError:
        alone = False
    try:
        yield alone
    finally:
        os.close(descriptor)
