"""The base of all trackers, and the tracker that writes metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.sample import Sample
from rlcore.runs.metrics import MetricsFile
from rlcore.tracking.format import TRAINING


class BaseTracker:
    """Records and shows the progress of a run (rank 0); each tracker overrides what it needs.

    Steps come in order. The first step that a tracker gets is the one after which a resumed run
    goes on: what an earlier process recorded of that step and later ones is void.
    """

    url: str | None = None  # where the run can be seen, if anywhere

    def start(self, description: Mapping[str, str]) -> None:
        """Begin the run; `description` says what was chosen, for people to read."""

    def show_prompt_lengths(self, lengths: NDArray[np.int64]) -> None:
        """Record how many tokens each prompt of the data set has, int [N]."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a finished step; step 0 is the evaluation before training."""

    def show_samples(self, step: int, samples: Sequence[Sample], label: str = TRAINING) -> None:
        """Show a few samples of `step`, to be read by people; `label` says where they are from."""

    def note(self, line: str) -> None:
        """Show one line to the people who watch."""

    def show_notices(self, names: Sequence[str]) -> None:
        """Show what looks wrong now, by the names of the rules in `tracking.notice_rules`."""

    def state(self) -> dict[str, Any]:
        """Return, JSON-able, what the tracker needs to go on in another process."""
        return {}

    def close(self, status: str) -> None:
        """End the run as `completed`, `early_stopped`, `failed` or `interrupted`."""


class JsonlTracker(BaseTracker):
    """Writes one line a step to metrics.jsonl, which plots and reports are made from."""

    def __init__(self, path: Path) -> None:
        self._file = MetricsFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of `step`."""
        self._file.append(step, metrics)
