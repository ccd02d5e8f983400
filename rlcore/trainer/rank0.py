"""Rank 0, for what only one process does: handing out batches, the log, checkpoints, and when to
stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing import split_minibatches
from rlcore.data.sample import Sample
from rlcore.data.step import StepRollouts, UpdateResult
from rlcore.errors import EngineFailed, RunFailed
from rlcore.interfaces import RolloutSource, Tracker
from rlcore.runs.checkpoints import Checkpoint, CheckpointStore, write_failure
from rlcore.runs.directory import RunDirectory, Status
from rlcore.runs.metrics import MetricsFile, read_metrics
from rlcore.runs.rng import restore_rng, rng_state
from rlcore.tracking.hub import push_to_hub
from rlcore.tracking.report import format_report, summarize
from rlcore.tracking.samples import pick_samples
from rlcore.trainer.early_stopping import EarlyStopping
from rlcore.trainer.engine_check import EngineCheck
from rlcore.trainer.mfu import Utilization
from rlcore.trainer.step_metrics import step_metrics

CONTINUE = "continue"
# what was waited for is there; first, an engine waits for the weights
READY = "ready"
CATCH_UP = "catch up"
FINISHED = ("completed", "early_stopped")  # the ends that count as a success
CARD_METRICS = (
    "step",
    "eval/accuracy",
    "eval/score",
    "rollout/reward",
    "objective/kl",
    "loss/policy_avg",
)
# placeholders where labels were written by people
ENGINE_VECTORS = ("rollout_logprobs", "versions")


@dataclass(frozen=True)
class Outcome:
    """How training ended: `completed | early_stopped | interrupted`, after this many steps."""

    status: Status
    steps: int


class RankZero:
    """What rank 0 does alone.

    Args:
        resume_from: the checkpoint after which the run goes on.
        replay_from: the shards that a replay starts from (`training.replay_from`), optimizer
            included.
        newest_version: that a publication has taken so far.
        origins: where each value of the configuration came from.
        utilization: measures `perf/mfu`; None where the GPUs' peak is not known.
    """

    def __init__(
        self,
        config: Config,
        *,
        source: RolloutSource,
        tracker: Tracker,
        directory: RunDirectory,
        checkpoints: CheckpointStore,
        total_steps: int,
        interrupted: Callable[[], bool],
        newest_version: Callable[[], int],
        resume_from: Checkpoint | None = None,
        replay_from: Path | None = None,
        origins: Mapping[str, str] | None = None,
        utilization: Utilization | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self.tracker = tracker
        self.directory = directory
        self.checkpoints = checkpoints
        self.total_steps = total_steps
        self.interrupted = interrupted
        self.utilization = utilization
        self._newest_version = newest_version
        self.early_stopping = EarlyStopping.of(config.training)
        self.step = 0
        self.episodes = 0
        self.minibatches: list[list[int]] = []
        self.metrics: dict[str, float] = {}  # of the step at hand
        self.reason: dict[str, Any] = {}  # why an early stop happened, for result.json
        self._compared: dict[str, float] = {}  # engine and trainer, where this step was checked
        self._resume_from = resume_from
        self._replay_from = replay_from
        self._origins = origins
        self._rollouts: StepRollouts | None = None
        self._batch: RolloutBatch | None = None
        self._version: int | None = None  # of the weights that `_batch` is trained on
        self._evaluation: dict[str, float] = {}
        self._evaluated: list[Sample] = []
        self._seconds_before = 0.0  # of earlier incarnations
        self._began = time.monotonic()

    # --- batches ----------------------------------------------------------------------------------

    def generated(self, step: int) -> str:
        """Wait for the samples of `step`: `READY`, `CATCH_UP`, or why no engine will make them."""
        try:
            found = self.source.next_step(step)
        # recovery: the trainer saves what it has, then stops
        except EngineFailed as error:
            return str(error)
        if found is None:
            return CATCH_UP
        self._rollouts = found
        return READY

    def evaluated(self) -> str:
        """Score the held-out prompts; the row that is logged next holds the result. As `generated`."""
        try:
            found = self.source.evaluate()
        except EngineFailed as error:  # recovery: as above
            return str(error)
        if found is None:
            return CATCH_UP
        self._evaluation, self._evaluated = found
        return READY

    def rollouts(self, step: int, version: int | None) -> RolloutBatch:
        """The samples of `step`, which policy `version` is to be trained on, cut into optimizer
        steps.
        """
        assert self._rollouts is not None
        batch = RolloutBatch.from_samples(self._rollouts.samples)
        self._version = batch.version = (
            self._rollouts.recorded_version if version is None else version
        )
        if self.config.is_sft:
            for name in ENGINE_VECTORS:
                del batch.vectors[name]
        if self._rollouts.policy_steps:
            batch.version = (self._rollouts.recorded_step or step) - 1
            batch.set(
                "versions", in_policy_steps(batch.vectors["versions"], self._rollouts.policy_steps)
            )
        self.minibatches = split_minibatches(
            batch.num_sequences,
            self.config.algorithm.minibatches,
            batch.vectors["group_ids"],
            seed=self.config.run.seed * 1_000_003 + (self._rollouts.recorded_step or step),
        )
        return batch

    def compare_logprobs(self, step: int, batch: RolloutBatch, check: EngineCheck | None) -> None:
        """The engine's with the trainer's, where that is due.

        Raises:
            RunFailed: they differ by more than `rollout.engine.max_logprob_diff` at the first step;
                later it is a warning.
        """
        assert self._rollouts is not None
        self._compared = {}
        if check is None or not check.is_due(step):
            return
        self._compared, trouble = check.compare(
            batch, self._rollouts.samples, self._rollouts.engines
        )
        if trouble and check.is_first(step):
            raise RunFailed(f"step {step}: {trouble}")
        if trouble:
            self.tracker.note(f"WARNING step {step}: {trouble}")

    # --- the decision and the log -----------------------------------------------------------------

    def end_step(
        self,
        step: int,
        batch: RolloutBatch,
        updates: Sequence[UpdateResult],
        seconds: Mapping[str, float],
    ) -> str:
        """Measure `step`; `CONTINUE`, or the status that the run ends with.

        Raises:
            RunFailed: early stopping is armed and the KL is not a number; the step is in the log.
        """
        assert self._rollouts is not None
        self.step = step
        self.episodes = self.episodes + batch.num_sequences
        self._batch = batch
        measured = step_metrics(
            self.config, self._rollouts, batch, updates, seconds, episodes=self.episodes
        )
        self.metrics = self._compared | measured
        if self.utilization is not None:
            used = self.utilization.mfu(batch, self.minibatches, updates, seconds=seconds["step"])
            self.metrics["perf/mfu"] = used
        try:
            status = self._status(self.metrics.get("objective/kl"))
        except RunFailed:
            self.log(step, seconds)
            raise
        return "interrupted" if status == CONTINUE and self.interrupted() else status

    def _status(self, kl: float | None) -> str:
        """What follows from the step at hand and its `objective/kl`."""
        if self._stops_early(kl):
            return "early_stopped"
        return "completed" if self.step >= self.total_steps else CONTINUE

    def log(self, step: int, seconds: Mapping[str, float]) -> None:
        """Write down `step`, with the evaluation if there was one; step 0 is the evaluation before
        training.
        """
        times = {f"time/{phase}": value for phase, value in seconds.items()}
        self.metrics |= {**self._evaluation, **times, "time/from_scratch": self._elapsed}
        if step > 0 or self._evaluation:
            self.tracker.log(step, self.metrics)
        self._show(step, self._evaluated)
        self._evaluation = {}
        self._evaluated = []
        if step == 0 or self.config.is_sft:
            return
        assert self._rollouts is not None
        assert self._batch is not None
        if self.config.tracking.save_rollouts:
            credit = self._batch.vectors["advantages"].split(self._batch.num_trainable_each)
            self.directory.write_rollouts(
                step,
                self._rollouts.samples,
                [part.numpy() for part in credit],
                version=self._version,
                policy_steps=self._rollouts.policy_steps,
            )
        if step % self.config.tracking.show_every == 0:
            self._show(step, self._rollouts.samples)

    def _show(self, step: int, samples: Sequence[Sample]) -> None:
        if picked := pick_samples(samples, self.config.tracking.show_samples):
            self.tracker.show_samples(step, picked)

    def _stops_early(self, kl: float | None) -> bool:
        if self.early_stopping is None or not self.early_stopping.trips(kl):
            return False
        assert kl is not None
        self.reason = {"objective_kl": kl, "target_kl": self.early_stopping.target_kl}
        self.tracker.note(self.early_stopping.tripped(self.step, kl))
        return True

    # --- checkpoints ------------------------------------------------------------------------------

    def begin_checkpoint(self, step: int) -> Path:
        """The state of rank 0 as it is now, and beside it an empty folder for every rank's shards."""
        assert self._rollouts is not None
        folder = self.checkpoints.begin(step) / "model"
        self.checkpoints.write_state(
            step,
            {
                "step": step,
                "version": self._newest_version(),
                "episodes": self.episodes,
                "seconds": self._elapsed,
                "objective_kl": self.metrics.get("objective/kl"),
                "source": self.source.snapshot(),
                "tracker": self.tracker.state(),
                "rng": rng_state(),  # of this rank: estimators, workflows and filters run here
            },
        )
        return folder

    def commit_checkpoint(self, step: int) -> None:
        """The rename that makes shards and state count."""
        self.checkpoints.commit(step)

    def checkpoint_failure(self, step: int, error: RunFailed) -> RunFailed:
        """What to raise when the shards of `step` could not be written; what there is of them is
        deleted.
        """
        failure = write_failure(self.checkpoints.folder, step, error)
        self.checkpoints.abort(step)
        return failure

    def restore(self) -> str:
        """The folder of the shards to load before training, "" for none; rank 0's own state is
        taken from a checkpoint.
        """
        found = self._resume_from
        self.source.restore(None if found is None else found.state["source"])
        if found is None:
            return str(self._replay_from or "")
        self.step = found.step
        self.episodes = int(found.state["episodes"])
        self._seconds_before = float(found.state["seconds"])
        return str(found.model)

    def go_on(self) -> str:
        """Everything is loaded: forget what the run did after this point. "STEP STATUS".

        The status is `CONTINUE`, unless a kill came between the last checkpoint and the result:
            then only the end is to do.
        """
        again_from_0 = self._resume_from is None  # the evaluation before training too
        MetricsFile(self.directory.metrics_path).rewind(-1 if again_from_0 else self.step)
        self.directory.rewind(self.step)
        # last: a recording that it does not know is a contradiction
        self.source.keep_ledger(self.directory.ledger_path)
        self.directory.write_config(self.config.model_dump(mode="json"), self._origins)
        found = self._resume_from
        if found is None:
            return f"{self.step} {CONTINUE}"
        self.checkpoints.rewind(found.step)
        self.tracker.note(f"resuming after step {found.step} from {found.folder}")
        restore_rng(found.state["rng"])
        return f"{found.step} {self._status(found.state.get('objective_kl'))}"

    # --- the end ----------------------------------------------------------------------------------

    def conclude(self, status: Status, *, reason: str = "") -> None:
        """Leave `result.json` behind and sum the run up."""
        self.directory.write_result(status, self.step, reason, seconds=self._elapsed, **self.reason)
        rows = read_metrics(self.directory.metrics_path)
        if rows and status != "failed":
            self.tracker.note(format_report(summarize(rows), result=self.directory.read_result()))

    def push(self, folder: Path) -> None:
        """Upload the final model, its card linked with the tracked run.

        A hub that refuses does not undo the run: `result.json` and the terminal say what is
            missing.
        """
        hub = self.config.tracking.hub
        result = self.directory.read_result()
        assert hub.repo is not None
        assert result is not None
        last = read_metrics(self.directory.metrics_path)[-1]
        try:
            result["hub"] = push_to_hub(
                folder,
                hub.repo,
                private=hub.private,
                run_name=self.directory.name,
                run_url=self.tracker.url,
                metrics={name: last[name] for name in CARD_METRICS if name in last},
            )
            self.tracker.note(f"pushed {folder} to {result['hub']}")
        except RunFailed as error:
            result["hub_error"] = str(error)
            self.tracker.note(str(error))
        self.directory.write_result(**result)

    @property
    def _elapsed(self) -> float:
        return self._seconds_before + time.monotonic() - self._began


def in_policy_steps(versions: Tensor, policy_steps: Mapping[int, int]) -> Tensor:
    """int64 [M]: of each token, the updates behind the weights that made it. Versions count
    publications: failed ones too.
    """
    known, place = versions.unique(return_inverse=True)
    return torch.tensor([policy_steps[version] for version in known.tolist()], dtype=torch.int64)[
        place
    ]
