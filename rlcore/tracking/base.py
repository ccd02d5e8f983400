"""What every tracker can be told; each overrides what it has a use for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.sample import Sample


class BaseTracker:
    """An `rlcore.interfaces.Tracker` that ignores everything.

    Steps come in order. The first one that a tracker hears of says where the run goes on after a
        resume: what the tracker
    recorded of that step and later ones in an earlier process is void.
    """

    url: str | None = None  # where the run can be seen, if anywhere

    def start(self, description: Mapping[str, str]) -> None:
        """The run begins; `description` says what was chosen, for people to read."""

    def show_prompt_lengths(self, lengths: NDArray[np.int64]) -> None:
        """Tokens of every prompt of the data set, int [N]."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a finished step; step 0 is the evaluation before training."""

    def show_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A few samples of `step`, to be read by people."""

    def note(self, line: str) -> None:
        """One line for the people who watch."""

    def state(self) -> dict[str, Any]:
        """JSON-able: what the tracker needs to go on in another process."""
        return {}

    def close(self, status: str) -> None:
        """The run ended as `completed`, `early_stopped`, `failed` or `interrupted`."""
