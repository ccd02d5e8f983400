"""One run as the page sees it: its files, and nothing outside its folder."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from rlcore.errors import DataError, UserError
from rlcore.runs.directory import RunDirectory
from rlcore.runs.sample_index import JOURNAL, IndexWriter, SampleIndex, Scalars, scalars_of
from rlcore.view.metrics import MetricsTable
from rlcore.view.pieces import TokenTexts
from rlcore.view.query import Place, Span, spans_of
from rlcore.view.reader import Record, RecordingReader

logger = logging.getLogger(__name__)


class LedgerReader(Protocol):
    """Reads what became of a run's draws. The package `rollout` knows the ledger's file."""

    def untrained(self) -> dict[str, Any]:
        """Return `counts`, `events` and `restarts`. Raises DataError where there is no ledger."""

    def life(self, draw: int) -> list[dict[str, Any]]:
        """Return what happened to a draw, in order. Raises DataError as above."""


REFRESH_S = 1.0  # files are looked at no oftener
_STEP = re.compile(r"step_(\d{1,12})\.jsonl\.zst")


class RunView:
    """Reads one run. Its own index counts first, and one in `cache` for steps that it lacks.

    Args:
        cache: a folder of this user for an index of the run, made as it is needed.
    """

    def __init__(self, name: str, path: Path, cache: Path, ledger: LedgerReader) -> None:
        if not (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
            raise UserError(
                f"{path} is no run: it has neither config.yaml nor metrics.jsonl; give folders as"
                " runs/NAME"
            )
        self.name = name
        self.ledger = ledger
        self.path = path.resolve()
        self.directory = RunDirectory(self.path)
        self.reader = RecordingReader()
        self.metrics = MetricsTable(lambda: self.inside(self.directory.metrics_path))
        self.texts = TokenTexts(self.config, self.path)
        self._own = SampleIndex(self.directory.index)
        self._cached = SampleIndex(cache)
        self._lock = threading.Lock()
        self._refreshed = 0.0
        self._changed: set[int] = set()  # steps that are recorded anew since they were indexed
        self._spans: list[Span] = []
        self._owners: dict[int, SampleIndex] = {}  # by step
        self.indexer = Indexer(self, cache)

    def inside(self, path: Path) -> Path:
        """Return `path`, which must lie in the run's folder, links followed.

        Raises:
            DataError: it does not.
        """
        found = path.resolve()
        if not found.is_relative_to(self.path):
            raise DataError(f"{path.name} is a link out of the run's folder, which is not followed")
        return found

    # --- what there is ----------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the run's configuration; {} where there is none or it cannot be read."""
        try:
            text = self.inside(self.directory.config_path).read_text(encoding="utf-8")
            found = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError, DataError):
            return {}
        return found if isinstance(found, dict) else {}

    def result(self) -> dict[str, Any]:
        """Return how the run ended; {} while it goes on or after a kill."""
        try:
            found = json.loads(self.inside(self.directory.result_path).read_bytes())
        except (OSError, ValueError, DataError):
            return {}
        return found if isinstance(found, dict) else {}

    def recorded(self) -> dict[int, Path]:
        """Return the recordings of steps that are on the disk."""
        return self._recordings(self.directory.rollouts)

    def evaluated(self) -> dict[int, Path]:
        """Return the recordings of evaluations, by the step that they came after."""
        return self._recordings(self.directory.evaluations)

    def _recordings(self, folder: Path) -> dict[int, Path]:
        if not self.inside(folder).is_dir():
            return {}
        with os.scandir(folder) as entries:
            found = ((_STEP.fullmatch(entry.name), entry.path) for entry in entries)
            return dict(sorted((int(match[1]), Path(path)) for match, path in found if match))

    def recording(self, step: int) -> Path:
        """Return the file of a step. Raises DataError where it is gone."""
        path = self.inside(self.directory.rollouts_path(step))
        if not path.is_file():
            raise DataError(
                f"the samples of step {step} are not on the disk (any more):"
                " tracking.save_rollouts, tracking.keep_rollouts"
            )
        return path

    # --- the index --------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """Return where the scalars of all steps are, newest first."""
        self.refresh()
        return self._spans

    def steps(self) -> list[int]:
        """Return the steps with scalars, in order."""
        self.refresh()
        return sorted(self._owners)

    def spans_between(self, first: int, last: int) -> list[Span]:
        """Return where the scalars of steps `first` to `last` are."""
        self.refresh()
        chosen = sorted((step for step in self._owners if first <= step <= last), reverse=True)
        return spans_of([(step, self._owners[step]) for step in chosen])

    def scalars(self, places: list[Place]) -> list[dict[str, Any]]:
        """Return the scalars of samples, with names in the place of their numbers."""
        return [_row(self._owners[place.step], place) for place in places]

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
            before = self._marks()
            self._refresh_own()
            self._cached.refresh()
            if self._marks() != before or now or not self._refreshed:
                owners = dict.fromkeys(self._cached.blocks, self._cached)
                owners |= {s: self._own for s in self._own.blocks if s not in self._changed}
                newest = sorted(owners.items(), reverse=True)
                self._owners = owners
                self._spans = spans_of(newest)
            self._refreshed = time.monotonic()

    def _marks(self) -> tuple[int, ...]:
        return len(self._own.blocks), len(self._cached.blocks), self._own.end

    def _refresh_own(self) -> None:
        try:
            self.inside(self.directory.index / JOURNAL)
            first = not self._own.blocks
            self._own.refresh()
            if first:
                self._changed |= {*self._own.damaged()}
        # recovery: the samples are indexed in the cache
        except DataError as error:
            logger.warning("%s", error)
            self._own = SampleIndex(self.directory.index / "none")

    def index_now(self, step: int) -> None:
        """Index a step in the cache, unless it is known."""
        if step in self.lacking():
            self.indexer.add([step])
        self.refresh(now=True)

    def lacking(self) -> list[int]:
        """Return recorded steps that no index knows as they are, newest first."""
        lacking = []
        for step, path in self.recorded().items():
            size = path.stat().st_size
            own = self._own.blocks.get(step)
            if own is not None and own.file_bytes != size:
                self._changed.add(step)
                own = None
            cached = self._cached.blocks.get(step)
            is_known = any(block and block.file_bytes == size for block in (own, cached))
            if not is_known or (step in self._changed and cached is None):
                lacking.append(step)
        return lacking[::-1]


def _row(index: SampleIndex, place: Place) -> dict[str, Any]:
    row = index.blocks[place.step].first + place.row
    found: dict[str, Any] = {"step": place.step, "row": place.row}
    for name in index.columns:
        if name == "prompt":  # 64 bits, which JavaScript would round
            continue
        value = index.column(name)[row].item()
        if name in index.names:
            value = index.names[name][value] if value < len(index.names[name]) else "?"
        found[name] = value
    return found


class Indexer:
    """Indexes what the run's own index lacks, in a thread, into a folder of this user."""

    def __init__(self, run: RunView, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.done = 0
        self.lacking = 0
        self.trouble = ""
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin; the thread ends with the process."""
        threading.Thread(target=self._work, name=f"index {self.run.name}", daemon=True).start()

    def stop(self) -> None:
        """End after the step at hand."""
        self._stop.set()

    def _work(self) -> None:
        failed: set[tuple[int, int]] = set()
        while not self._stop.wait(REFRESH_S):
            try:
                self.run.refresh(now=True)
                self._catch_up(failed)
            except (OSError, DataError) as error:
                self.trouble = str(error)

    def _catch_up(self, failed: set[tuple[int, int]]) -> None:
        """Index all steps that lack it. The first lock on the folder has the work."""
        steps = self.run.lacking()
        self.lacking = len(steps)
        self.done = 0
        if not steps:
            return
        self.add(steps, failed)
        self.lacking = self.done = 0

    def add(self, steps: Iterable[int], failed: set[tuple[int, int]] | None = None) -> None:
        """Index steps, unless another process is at it.

        Args:
            failed: steps and sizes of recordings that cannot be read; added to.
        """
        failed = set() if failed is None else failed
        with only_writer(self.folder) as alone:
            if not alone:
                return
            writer = IndexWriter(self.folder)
            for step in steps:
                self.done += 1
                path = self.run.recording(step)
                mark = (step, path.stat().st_size)
                if self._stop.is_set() or mark in failed:
                    continue
                try:
                    writer.append(step, mark[1], list(self._scalars(path)))
                except (DataError, ValueError, TypeError, KeyError, OverflowError) as error:
                    failed.add(mark)
                    self.trouble = f"step {step}: {error}"
                if self.done % 20 == 0:
                    self.run.refresh(now=True)
        self.run.refresh(now=True)

    def _scalars(self, path: Path) -> Iterator[Scalars]:
        return (scalars_of(record) for record in self.run.reader.all(path))


def record_at(run: RunView, place: Place) -> Record:
    """Return a recorded sample. Raises DataError where there is none."""
    found = run.reader.records(run.recording(place.step), [place.row])
    if place.row not in found:
        raise DataError(f"step {place.step} has no sample {place.row}")
    return found[place.row]


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
