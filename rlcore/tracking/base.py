"""The base of all trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.sample import Sample
from rlcore.tracking.format import TRAINING


class BaseTracker:
    """Records and shows the progress of a run (rank 0); each tracker overrides the calls it needs.

    Steps come in order. The first step that a tracker gets in a resumed run makes void an earlier
    process's records of that step and later steps.
    """

    url: str | None = None  # the run's page, if it has one

    def start(self, description: Mapping[str, str]) -> None:
        """Begin the run; `description` has the main settings, for people to read."""

    def show_prompt_lengths(self, lengths: NDArray[np.int64]) -> None:
        """Record the number of tokens of each prompt of the data set, int [N]."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a finished step; step 0 is the evaluation before training."""

    def show_samples(self, step: int, samples: Sequence[Sample], label: str = TRAINING) -> None:
        """Show a few samples of `step` to people; `label` names their source."""

    def note(self, line: str) -> None:
        """Show a line to people who watch the run."""

    def show_notices(self, names: Sequence[str]) -> None:
        """Show the current alerts, by the names of their rules in `tracking.notice_rules`."""

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state with which the tracker continues in another process."""
        return {}

    def close(self, status: str) -> None:
        """End the run as `completed`, `early_stopped`, `failed` or `interrupted`."""
