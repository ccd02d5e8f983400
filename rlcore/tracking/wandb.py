"""Weights & Biases. `mode: offline` needs no account: `wandb sync` uploads later."""

from __future__ import annotations

import sys
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config.secrets import mask_arguments
from rlcore.config.sections.training import WandbConfig
from rlcore.data.sample import Sample
from rlcore.deadlines import UPLOAD_S
from rlcore.errors import UserError
from rlcore.runs.files import write_atomic
from rlcore.tracking.base import BaseTracker
from rlcore.tracking.format import TRAINING

ID_FILE = "wandb_run_id"
TABLE_ROWS = 200  # newest samples in the table
COLUMNS = ("step", "prompt", "response", "reward", "finish_reason", "tokens", "label", "kind")


class WandbTracker(BaseTracker):
    """Keeps one wandb run per rlcore run, over restarts.

    The run id comes from the checkpoint (`state`) or, if the run was killed before its first
    checkpoint, from a file in the run's folder.
    """

    def __init__(
        self,
        config: WandbConfig,
        *,
        name: str,
        folder: Path,
        settings: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "tracking.wandb is enabled but the package wandb is not installed: "
                "pip install 'rlcore[wandb]', or set tracking.wandb.enabled=false"
            ) from None
        self._wandb = wandb
        self._offline = config.mode == "offline"
        id_file = folder / ID_FILE
        known = (state or {}).get("id") or (
            id_file.read_text().strip() if id_file.exists() else None
        )
        self.id: str = known or uuid.uuid4().hex[:12]
        options: dict[str, Any] = {"console": "off", "silent": self._offline}
        if "finish_timeout" in wandb.Settings.model_fields:
            options["finish_timeout"] = UPLOAD_S
        # wandb records the command line, which may hold secrets.
        given = sys.argv
        sys.argv = [*given[:1], *mask_arguments(given[1:])]
        try:
            self.run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=name,
                id=self.id,
                # Offline there is no server to ask; `wandb sync` joins runs with the same id.
                resume=None if self._offline else "allow",
                mode=config.mode,
                tags=config.tags or None,
                dir=str(folder),
                config=dict(settings),
                settings=wandb.Settings(**options),
            )
        except wandb.Error as error:
            raise UserError(
                f"wandb could not start the run: {error}; log in with `wandb login`, "
                "or set tracking.wandb.mode=offline, or tracking.wandb.enabled=false"
            ) from error
        finally:
            sys.argv = given
        write_atomic(id_file, self.id.encode())
        # wandb's own step may not decrease, so a resumed run would lose the steps that it repeats.
        # Our step is a metric, which may decrease.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        self._rows: deque[list[Any]] = deque(maxlen=TABLE_ROWS)
        self._new = known is None

    @property
    def url(self) -> str | None:  # type: ignore[override]
        """The run's page, unless offline."""
        return None if self._offline else self.run.url

    def show_prompt_lengths(self, lengths: NDArray[np.int64]) -> None:
        """Log a histogram, only in the first process of a run."""
        if self._new and len(lengths):
            counts = np.histogram(lengths, bins=min(64, int(np.ptp(lengths)) + 1))
            self.run.log(
                {"data/prompt_lengths": self._wandb.Histogram(np_histogram=counts), "step": 0}
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics under our step."""
        self.run.log({**metrics, "step": step})

    def show_samples(self, step: int, samples: Sequence[Sample], label: str = TRAINING) -> None:
        """Add the samples to the table of the newest ones."""
        for s in samples:
            expected = "" if s.label is None else str(s.label)
            texts = [step, s.prompt_text, s.response_text]
            numbers = [s.reward, s.finish_reason, s.num_trainable]
            self._rows.append([*texts, *numbers, expected, label])
        table = self._wandb.Table(columns=list(COLUMNS), data=list(self._rows))
        self.run.log({"samples": table, "step": step})

    def state(self) -> dict[str, Any]:
        """Return the id of the wandb run."""
        return {"id": self.id}

    def close(self, status: str) -> None:
        """End the wandb run with the status."""
        self.run.summary["status"] = status
        self.run.finish(exit_code=0 if status in ("completed", "early_stopped") else 1)
