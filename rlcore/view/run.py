"""One run as the page sees it: its files, and nothing outside its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

import yaml

from rlcore.errors import DataError, UserError
from rlcore.runs.directory import STEP_FILE, RunDirectory
from rlcore.view.indexing import Indexer, RunIndex
from rlcore.view.metrics import MetricsTable
from rlcore.view.pieces import TokenTexts
from rlcore.view.query import Place
from rlcore.view.reader import Record, RecordingReader


class LedgerReader(Protocol):
    """Reads what became of a run's draws. The package `rollout` knows the ledger's file."""

    def untrained(self) -> dict[str, Any]:
        """Return `counts`, `events` and `restarts`. Raises DataError where there is no ledger."""

    def life(self, draw: int) -> list[dict[str, Any]]:
        """Return what happened to a draw, in order. Raises DataError as above."""


class RunView:
    """Reads one run.

    Args:
        cache: a folder of this user, for an index of what the run has not indexed itself.
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
        self.index = RunIndex(
            self.directory.index, cache, recordings=self.recorded, inside=self.inside
        )
        self.indexer = Indexer(
            self.index,
            cache,
            reader=RecordingReader(0),  # what it reads once need not stay in memory
            recordings=self.directory.rollouts,
            recording=self.recording,
        )

    def inside(self, path: Path) -> Path:
        """Return `path`, which must lie in the run's folder, links followed.

        Raises:
            DataError: it does not.
        """
        return inside(self.path, path)

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
            found = ((STEP_FILE.fullmatch(entry.name), entry.path) for entry in entries)
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


def inside(folder: Path, path: Path) -> Path:
    """Return `path`, which must lie in a run's resolved folder. Raises as `RunView.inside` does."""
    found = path.resolve()
    if not found.is_relative_to(folder):
        raise DataError(f"{path.name} is a link out of the run's folder, which is not followed")
    return found


def record_at(run: RunView, place: Place) -> Record:
    """Return a recorded sample. Raises DataError where there is none."""
    found = run.reader.records(run.recording(place.step), [place.row])
    if place.row not in found:
        raise DataError(f"step {place.step} has no sample {place.row}")
    return found[place.row]
