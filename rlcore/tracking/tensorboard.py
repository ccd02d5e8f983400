"""TensorBoard event files in `<run>/tensorboard/`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.sample import Sample
from rlcore.errors import UserError
from rlcore.tracking.base import BaseTracker
from rlcore.tracking.format import TRAINING, sample_lines


class TensorboardTracker(BaseTracker):
    """Scalars under their metric names, samples and the configuration as text."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        if find_spec("tensorboard") is None:
            raise UserError(
                "tracking.tensorboard is on but the package tensorboard is not installed: "
                "pip install 'rlcore[tensorboard]', or set tracking.tensorboard=false"
            )
        self.folder = folder
        self._settings = settings
        self._writer: Any = None
        self._prompt_lengths: NDArray[np.int64] | None = None

    def show_prompt_lengths(self, lengths: NDArray[np.int64]) -> None:
        """Keep the lengths for the histogram that is written with the first step."""
        self._prompt_lengths = lengths

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric."""
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def show_samples(self, step: int, samples: Sequence[Sample], label: str = TRAINING) -> None:
        """Write the samples as text, held-out samples under another name."""
        blocks = [
            "\n".join(f"    {line}" for text in sample_lines(s) for line in text.split("\n"))
            for s in samples
        ]
        name = "samples" if label == TRAINING else label.replace(" ", "_")
        text = "\n\n---\n\n".join(blocks)
        # A workflow may return half a surrogate pair, which is not UTF-8, so escape it.
        text = text.encode(errors="backslashreplace").decode()
        self._open(step).add_text(name, text, step)

    def close(self, status: str) -> None:
        """Write the status and close the file."""
        if self._writer is not None:
            self._writer.add_text("status", status)
            self._writer.close()

    def _open(self, step: int) -> Any:
        """Return the writer, made at the first step.

        TensorBoard then drops an earlier process's records of that step and later steps. If
        anything were written before, a resumed run would lose all its curves.
        """
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=step)
            text = json.dumps(self._settings, indent=2)
            self._writer.add_text("config", "    " + text.replace("\n", "\n    "), step)
            if self._prompt_lengths is not None and len(self._prompt_lengths):
                self._writer.add_histogram("data/prompt_lengths", self._prompt_lengths, step)
        return self._writer
