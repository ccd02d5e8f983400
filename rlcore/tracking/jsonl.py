"""metrics.jsonl: always written, and what plots and reports are made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlcore.runs.metrics import MetricsFile
from rlcore.tracking.base import BaseTracker


class JsonlTracker(BaseTracker):
    """One line a step in `path`, from which a resume has removed the steps that come again."""

    def __init__(self, path: Path) -> None:
        self._file = MetricsFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.append(step, metrics)
