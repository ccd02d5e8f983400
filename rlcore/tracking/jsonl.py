"""metrics.jsonl: always written, and what plots and reports are made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlcore.runs.metrics import MetricsFile
from rlcore.tracking.base import BaseTracker


class JsonlTracker(BaseTracker):
    """One line a step in `path`."""

    def __init__(self, path: Path) -> None:
        self._file = MetricsFile(path)
        self._started = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._started:
            self._file.rewind(step - 1)
            self._started = True
        self._file.append(step, metrics)
