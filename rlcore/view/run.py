"""One run as the page sees it: its files, and nothing outside its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import yaml

from rlcore.errors import DataError, UserError
from rlcore.runs.directory import STEP_FILE, RunDirectory
from rlcore.runs.rollouts import Record, read_table
from rlcore.view.metrics import MetricsTable
from rlcore.view.pieces import TokenTexts
from rlcore.view.samples import Samples


class LedgerReader(Protocol):
    """Reads what became of a run's draws. The package `rollout` knows the ledger's file."""

    def untrained(self) -> dict[str, Any]:
        """Return `counts`, `events` and `restarts`. Raises DataError where there is no ledger."""

    def life(self, draw: int) -> list[dict[str, Any]]:
        """Return what happened to a draw, in order. Raises DataError as above."""


class RunView:
    """Reads one run."""

    def __init__(self, name: str, path: Path, ledger: LedgerReader) -> None:
        if not (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
            raise UserError(
                f"{path} is no run: it has neither config.yaml nor metrics.jsonl; give folders as"
                " runs/NAME"
            )
        self.name = name
        self.ledger = ledger
        self.path = path.resolve()
        self.directory = RunDirectory(self.path)
        self.metrics = MetricsTable(lambda: self.inside(self.directory.metrics_path))
        self.texts = TokenTexts(self.config, self.path)
        self.samples = Samples(
            lambda: self._by_step(self.directory.index),
            lambda: self._by_step(self.directory.merged_index),
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
        return self._by_step(self.directory.rollouts)

    def evaluated(self) -> dict[int, Path]:
        """Return the recordings of evaluations, by the step that they came after."""
        return self._by_step(self.directory.evaluations)

    def _by_step(self, folder: Path) -> dict[int, Path]:
        if not self.inside(folder).is_dir():
            return {}
        with os.scandir(folder) as entries:
            found = [(STEP_FILE.fullmatch(entry.name), entry) for entry in entries]
        files = {int(match[1]): entry for match, entry in found if match}
        return {
            step: self.inside(Path(entry)) if entry.is_symlink() else Path(entry)
            for step, entry in sorted(files.items())
        }

    def recording(self, step: int) -> Path:
        """Return the file of a step. Raises DataError where it is gone."""
        path = self.inside(self.directory.rollouts_path(step))
        if not path.is_file():
            raise DataError(
                f"the samples of step {step} are not on the disk (any more):"
                " tracking.save_rollouts, tracking.keep_rollouts"
            )
        return path

    def records(self, step: int, rows: Iterable[int]) -> dict[int, Record]:
        """Return recorded samples by their rows. Raises DataError where one is missing."""
        wanted = set(rows)
        found = dict(read_table(self.recording(step), rows=wanted))
        if lacking := wanted - found.keys():
            raise DataError(f"step {step} has no sample {min(lacking)}")
        return found


def inside(folder: Path, path: Path) -> Path:
    """Return `path`, which must lie in a run's resolved folder. Raises as `RunView.inside` does."""
    found = path.resolve()
    if not found.is_relative_to(folder):
        raise DataError(f"{path.name} is a link out of the run's folder, which is not followed")
    return found
