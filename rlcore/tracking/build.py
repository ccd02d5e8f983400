"""Combines all trackers of a run in one, and makes them from the configuration."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.config.secrets import masked
from rlcore.data.sample import Sample
from rlcore.runs.directory import RunDirectory
from rlcore.runs.metrics import MetricsFile, read_metrics
from rlcore.tracking.base import BaseTracker
from rlcore.tracking.format import TRAINING
from rlcore.tracking.notices import Notices
from rlcore.tracking.progress import Progress

logger = logging.getLogger(__name__)


class Trackers(BaseTracker):
    """Writes metrics.jsonl, and passes every call on to the progress display and other trackers.

    A failure of the first two ends the run, since metrics.jsonl is the record of the run. Another
    tracker that fails (a service that is down, a full disk) is dropped with a warning.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        progress: BaseTracker,
        optional: Mapping[str, BaseTracker] = MappingProxyType({}),
        *,
        notices: Notices | None = None,
    ) -> None:
        self._metrics = metrics
        self._progress = progress
        self.optional = dict(optional)
        self._notices = notices
        self._closed = False

    @property
    def url(self) -> str | None:  # type: ignore[override]
        """The first address among the trackers."""
        trackers = (self._progress, *self.optional.values())
        return next((tracker.url for tracker in trackers if tracker.url), None)

    def start(self, description: Mapping[str, str]) -> None:
        self._each(lambda tracker: tracker.start(description))

    def show_prompt_lengths(self, lengths: NDArray[np.int64]) -> None:
        self._each(lambda tracker: tracker.show_prompt_lengths(lengths))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.append(step, metrics)
        self._each(lambda tracker: tracker.log(step, metrics))
        if self._notices is not None:
            for notice in self._notices.check(step, metrics):
                self.note(str(notice))
            current = self._notices.current
            self._each(lambda tracker: tracker.show_notices(current))

    def show_samples(self, step: int, samples: Sequence[Sample], label: str = TRAINING) -> None:
        self._each(lambda tracker: tracker.show_samples(step, samples, label))

    def note(self, line: str) -> None:
        """Pass the line on, and log it, as the terminal's history may be lost later."""
        logger.info("%s", line)
        self._each(lambda tracker: tracker.note(line))

    def state(self) -> dict[str, Any]:
        """Return the state of each tracker with a state, by the tracker's name."""
        states = {name: tracker.state() for name, tracker in self.optional.items()}
        return {name: state for name, state in states.items() if state}

    def close(self, status: str) -> None:
        """Close every tracker; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._each(lambda tracker: tracker.close(status))

    def _each(self, call: Callable[[BaseTracker], None]) -> None:
        call(self._progress)
        for name, tracker in list(self.optional.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  from a service; the run continues without it
                del self.optional[name]
                kind = type(error).__name__
                logger.warning("%s failed and is left out from here on: %s: %s", name, kind, error)


def build_trackers(
    config: Config,
    directory: RunDirectory,
    resume_state: Mapping[str, Any] | None = None,
    *,
    total_steps: int,
    stream: TextIO | None = None,
) -> Trackers:
    """Make the trackers that `tracking` asks for; metrics.jsonl and progress are always among them.

    Args:
        resume_state: the result of `Trackers.state` in the previous process. Without it a resumed
            run finds its wandb run by a file in its folder.

    Raises:
        UserError: a package is missing, or wandb refuses.
    """
    optional: dict[str, BaseTracker] = {}
    settings = masked(config.model_dump(mode="json"))
    if config.tracking.tensorboard:
        from rlcore.tracking.tensorboard import TensorboardTracker

        optional["tensorboard"] = TensorboardTracker(directory.path / "tensorboard", settings)
    if config.tracking.wandb.enabled:
        from rlcore.tracking.wandb import WandbTracker

        optional["wandb"] = WandbTracker(
            config.tracking.wandb,
            name=config.run.name,
            folder=directory.path,
            settings=settings,
            state=(resume_state or {}).get("wandb"),
        )
    return Trackers(
        MetricsFile(directory.metrics_path),
        Progress(config.run.name, total_steps, stream or sys.stdout),
        optional,
        notices=Notices(
            directory.notices_path,
            groups=0 if config.learns_from_rows else config.rollout.prompts_per_step,
            earlier=lambda: read_metrics(directory.metrics_path),
        ),
    )
