"""Rank 0's own work: batches, metrics, its part of a checkpoint, and the decision to stop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlcore.config import Config
from rlcore.config.evaluation_sets import SET_KEY, set_of
from rlcore.config.sections.training import TrainingConfig
from rlcore.data.batch import RolloutBatch, StepRollouts, UpdateResult
from rlcore.data.packing.plan import MinibatchPlan, split_minibatches
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, EngineFailed, RunFailed, TooManyFailed
from rlcore.interfaces import RolloutSource
from rlcore.runs.checkpoints import Best, Checkpoint, CheckpointStore, best_of
from rlcore.runs.directory import RunDirectory, Status
from rlcore.runs.environment import describe_start
from rlcore.runs.files import append_json_line, rotate_logs
from rlcore.runs.metrics import MetricsFile, read_metrics
from rlcore.runs.recorder import RolloutRecorder
from rlcore.runs.state_codec import restore_rng, rng_state
from rlcore.tracking.base import BaseTracker
from rlcore.tracking.format import HELD_OUT, TRAINING, pick_samples
from rlcore.tracking.report import format_report
from rlcore.trainer.engine_check import EngineCheck
from rlcore.trainer.held_out import HeldOutRows, batch_of_rows
from rlcore.trainer.step_metrics import Utilization, step_metrics

CONTINUE = "continue"
READY = "ready"  # the rollouts are there
CATCH_UP = "catch up"  # an engine that was started again needs the weights first
FINISHED = ("completed", "early_stopped")  # the statuses that count as a success
NO_CHECKPOINT = "WARNING no checkpoint to resume from (checkpoint.every): the run starts over"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The end of training: `completed | early_stopped | interrupted`, after `steps` steps."""

    status: Status
    steps: int


@dataclass(frozen=True)
class EarlyStopping:
    """Stops after a step whose `objective/kl` exceeds `target_kl` (nats a sequence)."""

    target_kl: float

    @classmethod
    def of(cls, training: TrainingConfig) -> EarlyStopping | None:
        """Build it from `training.early_stopping`; None unless that is armed."""
        if not training.early_stopping or not training.target_kl:
            return None
        return cls(training.target_kl)

    def trips(self, kl: float | None) -> bool:
        """Whether training ends after a step with this `objective/kl`, if the step has one.

        Raises:
            RunFailed: the KL is not a number.
        """
        if kl is None:
            return False
        if math.isnan(kl):
            raise RunFailed(
                "early stopping: objective/kl is NaN, so there is nothing to compare with"
                f" training.target_kl ({self.target_kl:g}); look for the first NaN in metrics.jsonl"
            )
        return kl > self.target_kl

    @property
    def armed(self) -> str:
        """The log line that announces at the start of a run that early stopping is on."""
        limit = f"objective/kl above training.target_kl {self.target_kl:g}"
        return f"early stopping is armed: {limit} ends the run after that step"


class RankZero:
    """The work of rank 0 alone; the training loop calls it through `RankSync.run_on_rank0`.

    Args:
        held_out: the rows of evaluation sets, where nothing generates.
        interrupted: whether the run was asked to end.
        newest_version: returns the newest version that a publication has taken.
        resume_from: the checkpoint from which the run continues.
        replay_from: the shards, optimizer included, that a replay starts from
            (`training.replay_from`).
        origins: where each configuration value came from.
        utilization: measures `perf/mfu`; None if the peak of the GPUs is unknown.
    """

    def __init__(
        self,
        config: Config,
        *,
        source: RolloutSource,
        held_out: HeldOutRows | None = None,
        tracker: BaseTracker,
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
        self.held_out = held_out
        self.tracker = tracker
        self.directory = directory
        self.recorder = RolloutRecorder(
            directory,
            keep=config.tracking.keep_rollouts,
            collective_timeout_s=config.cluster.collective_timeout_s,
        )
        self.checkpoints = checkpoints
        self.total_steps = total_steps
        self.interrupted = interrupted
        self.utilization = utilization
        self._newest_version = newest_version
        self.early_stopping = EarlyStopping.of(config.training)
        self.step = 0
        self.episodes = 0
        self.minibatches: list[list[int]] = []
        self.plans: Sequence[MinibatchPlan] = ()
        # Metrics of the current step.
        self.metrics: dict[str, float] = {}
        # Why the run stopped early, for result.json.
        self.reason: dict[str, Any] = {}
        # Differences between engine and trainer, if this step was compared.
        self._compared: dict[str, float] = {}
        self._resume_from = resume_from
        self._replay_from = replay_from
        self._origins = origins
        self._rollouts: StepRollouts | None = None
        self._batch: RolloutBatch | None = None
        # Version of the weights that are trained on `_batch`.
        self._version: int | None = None
        self._evaluation: dict[str, float] = {}
        self._evaluated: list[Sample] = []
        self._scored_sets: Sequence[str] = ()
        self.best: Best | None = None
        # Seconds spent in earlier processes of this run.
        self._seconds_before = 0.0
        self._began = time.monotonic()

    # --- batches ----------------------------------------------------------------------------------

    def generate(self, step: int) -> str:
        """Wait for the samples of `step`: `READY`, `CATCH_UP`, or why there will be none."""
        try:
            found = self.source.next_step(step)
        # recovery: the trainer saves its state, then stops
        except (EngineFailed, TooManyFailed) as error:
            return str(error)
        if found is None:
            return CATCH_UP
        self._rollouts = found
        return READY

    def evaluate(self, sets: Sequence[str]) -> str:
        """Score held-out prompts for the next log row. Returns as `generate` does."""
        try:
            found = self.source.evaluate(sets)
        except (EngineFailed, TooManyFailed) as error:
            # recovery: as above
            return str(error)
        if found is None:
            return CATCH_UP
        self._evaluation, self._evaluated = found
        self._scored_sets = sets
        return READY

    def end_scoring(self, sets: Sequence[str]) -> None:
        """Take what was measured of held-out rows for the next log row."""
        assert self.held_out is not None
        self._evaluation = self.held_out.metrics()
        self._scored_sets = sets

    def build_batch(
        self, step: int, version: int | None, *, reward_parts: Sequence[str] = ()
    ) -> RolloutBatch:
        """Make the batch of `step` for policy `version`, and choose its mini-batches."""
        rollouts = self._rollouts
        assert rollouts is not None
        if self.config.learns_from_rows:
            batch = batch_of_rows(rollouts.samples)
        else:
            batch = RolloutBatch.from_samples(rollouts.samples, reward_parts=reward_parts)
        self._version = rollouts.recorded_version if version is None else version
        batch.version = self._version
        batch.lend_arrays(rollouts.samples)
        trained_step = rollouts.recorded_step or step
        if rollouts.policy_steps and batch.versions is not None:
            batch.version = trained_step - 1
            batch.versions = rollouts.in_policy_steps(batch.versions)
        self.minibatches = split_minibatches(
            self.config.algorithm.minibatches,
            batch.vectors["group_ids"],
            batch.vectors["rollout_ids"],
            seed=self.config.run.seed * 1_000_003 + trained_step,
        )
        return batch

    def compare_logprobs(self, step: int, batch: RolloutBatch, check: EngineCheck | None) -> None:
        """Compare log-probs of engine and trainer, if `check` is due at this step.

        Raises:
            RunFailed: at the first step they differ by more than `rollout.engine.max_logprob_diff`.
                At later steps this is a warning.
        """
        assert self._rollouts is not None
        self._compared = {}
        if check is None or not check.is_due(step):
            return
        rollouts = self._rollouts
        self._compared, trouble = check.compare(batch, rollouts.samples, rollouts.engines)
        if trouble and check.is_first(step):
            raise RunFailed(f"step {step}: {trouble}")
        if trouble:
            self.tracker.note(f"WARNING step {step}: {trouble}")

    # --- decision and log -------------------------------------------------------------------------

    def end_step(
        self,
        step: int,
        batch: RolloutBatch,
        updates: Sequence[UpdateResult],
        seconds: Mapping[str, float],
    ) -> str:
        """Measure `step`. Returns `CONTINUE`, or the status that ends the run.

        Raises:
            RunFailed: early stopping is armed and the KL is not a number; the step is in the log.
        """
        assert self._rollouts is not None
        self.step = step
        self.episodes += batch.num_rollouts
        self._batch = batch
        measured = step_metrics(
            self.config, self._rollouts, batch, updates, seconds, episodes=self.episodes
        )
        self.metrics = self._compared | measured
        if (use := self.utilization) is not None:
            most = seconds["step"] * use.peak
            self.metrics["perf/mfu"] = use.flops(batch, self.minibatches, updates) / most
            if "perf/shared_tokens" in self.metrics:
                computed = use.flops(batch, self.minibatches, updates, self.plans)
                self.metrics["perf/computed_mfu"] = computed / most
        try:
            status = self._status(self.metrics.get("objective/kl"))
        except RunFailed:
            self.log(step, seconds)
            raise
        return "interrupted" if status == CONTINUE and self.interrupted() else status

    def _status(self, kl: float | None) -> str:
        """Return the status after a step with this `objective/kl`."""
        early = self.early_stopping
        if early is not None and kl is not None and early.trips(kl):
            self.reason = {"objective_kl": kl, "target_kl": early.target_kl}
            self.tracker.note(
                f"early stopping: objective/kl {kl:.6g} of step {self.step} is above"
                f" training.target_kl {early.target_kl:g}; the model is saved and the run ends as a"
                " success"
            )
            return "early_stopped"
        return "completed" if self.step >= self.total_steps else CONTINUE

    def log(self, step: int, seconds: Mapping[str, float]) -> None:
        """Write the metrics of `step`, and of its evaluation if there was one.

        Step 0 is the evaluation before training.
        """
        times = {f"time/{phase}": value for phase, value in seconds.items()}
        self.metrics |= {**self._evaluation, **times, "time/from_scratch": self._elapsed}
        if step > 0 or self._evaluation:
            self.tracker.log(step, self.metrics)
        by_set: dict[str, list[Sample]] = {}
        for sample in self._evaluated:
            by_set.setdefault(sample.metadata.get(SET_KEY, ""), []).append(sample)
        for name, samples in by_set.items():
            self._show(step, samples, f"{HELD_OUT} ({name})" if name else HELD_OUT)
        saves = self.config.tracking.save_rollouts
        if self._evaluated and saves:
            self.recorder.record_evaluation(step, self._evaluated)
        self._evaluation = {}
        self._evaluated = []
        if step > 0 and not self.config.learns_from_rows:
            rollouts = self._rollouts
            assert rollouts is not None
            assert self._batch is not None
            if saves:
                self.recorder.record(
                    step,
                    rollouts.samples,
                    self._batch,
                    unscored=rollouts.unscored,
                    version=self._version,
                    policy_steps=rollouts.policy_steps,
                )
            if step % self.config.tracking.show_every == 0:
                self._show(step, rollouts.samples, TRAINING)
        rotate_logs(self.directory.logs)

    def _show(self, step: int, samples: Sequence[Sample], label: str) -> None:
        if picked := pick_samples(samples, self.config.tracking.show_samples):
            self.tracker.show_samples(step, picked, label)

    # --- checkpoints ------------------------------------------------------------------------------

    def find_best(self, step: int) -> bool:
        """Whether the evaluation in the row of `step` is the best so far.

        The weights before the first step are in no checkpoint, so they are never the best.

        Raises:
            ConfigError: the evaluation before the first step lacks the metric.
        """
        wanted = self.config.checkpoint.best
        assert wanted is not None
        scored = self._scored_sets
        self._scored_sets = ()
        if set_of(wanted.metric) not in scored:
            return False
        value = self.metrics.get(wanted.metric)
        if value is None:
            message = (
                f"checkpoint.best.metric: the evaluation after step {step} gave no {wanted.metric};"
                f" it gave {', '.join(name for name in self.metrics if name.startswith('eval/'))}"
            )
            if step == 0:
                raise ConfigError(message)
            self.tracker.note(f"WARNING {message}")
        if value is None or math.isnan(value) or step == 0:
            return False
        sign = 1 if wanted.mode == "max" else -1
        if self.best is not None and sign * value <= sign * self.best.value:
            return False
        self.best = Best(step, wanted.metric, wanted.mode, float(value))
        self.tracker.note(f"the best {wanted.metric} so far is {value:.6g}, after step {step}")
        return True

    def begin_checkpoint(self, step: int) -> Path:
        """Write the current state of rank 0. Returns an empty folder for the ranks' shards."""
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
                "best": None if self.best is None else asdict(self.best),
                # Of this rank, which runs estimators, workflows and filters.
                "rng": rng_state(),
            },
        )
        return folder

    def commit_checkpoint(self, step: int) -> None:
        """Commit the checkpoint of `step`, once all samples up to it are recorded."""
        self.recorder.finish()
        self.checkpoints.commit(step)

    def restore(self) -> str:
        """Restore rank 0's state from the checkpoint, if there is one.

        Returns:
            The folder of the shards to load before training; "" if there is none.
        """
        found = self._resume_from
        self.source.restore(None if found is None else found.state["source"])
        if found is None:
            return str(self._replay_from or "")
        self.step = found.step
        self.episodes = int(found.state["episodes"])
        self._seconds_before = float(found.state["seconds"])
        return str(found.model)

    def begin(self) -> str:
        """Delete the files of later steps from the run's folder, once everything is loaded.

        Returns:
            "STEP STATUS". The status is `CONTINUE`, unless a kill came between the last checkpoint
            and the result; then no step is left to train.
        """
        found = self._resume_from
        # Without a checkpoint the evaluation before training, step 0, runs again too.
        lost = MetricsFile(self.directory.metrics_path).rewind(-1 if found is None else self.step)
        if lost and found is None:
            self.tracker.note(f"{NO_CHECKPOINT}, and {lost} rows of its log are deleted")
        self.directory.rewind(self.step)
        # Only after the samples: recorded samples of a draw that the ledger lacks contradict it.
        self.source.keep_ledger(self.directory.ledger_path)
        self.directory.write_config(self.config.model_dump(mode="json"), self._origins)
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        start = describe_start(self.step, self.source.snapshot(), gpus=gpus)
        append_json_line(self.directory.environment_path, start)
        if found is None:
            return f"{self.step} {CONTINUE}"
        # The best checkpoint of that time, unless it is deleted or used another metric.
        wanted = self.config.checkpoint.best
        best = best_of(found.state)
        if not (wanted and best and (best.metric, best.mode) == (wanted.metric, wanted.mode)):
            best = None
        elif not self.checkpoints.path(best.step).is_dir():
            self.tracker.note(
                f"WARNING the checkpoint of step {best.step} with the best {best.metric} is gone:"
                " the next evaluation counts as the best"
            )
            best = None
        self.best = best
        self.checkpoints.point_to_best(best)
        self.checkpoints.rewind(found.step)
        self.tracker.note(f"resuming after step {found.step} from {found.folder}")
        restore_rng(found.state["rng"])
        return f"{found.step} {self._status(found.state.get('objective_kl'))}"

    # --- the end ----------------------------------------------------------------------------------

    def conclude(self, status: Status, *, reason: str = "") -> None:
        """Write `result.json` and show a summary of the run.

        All samples are written to disk first; after a failure they come last, since writing may
        fail.

        Args:
            reason: why the run failed; no later error may hide it.
        """
        if not reason:
            self.recorder.finish()
        more = self.reason if self.best is None else self.reason | {"best": asdict(self.best)}
        self.directory.write_result(status, self.step, reason, seconds=self._elapsed, **more)
        rows = read_metrics(self.directory.metrics_path)
        if rows and status != "failed":
            self.tracker.note(format_report(rows, result=self.directory.read_result()))
        if reason:
            try:
                self.recorder.finish()
            except Exception as error:  # noqa: BLE001 - recovery: the run has failed anyway
                logger.error("the last samples were not recorded: %s", error)

    @property
    def _elapsed(self) -> float:
        return self._seconds_before + time.monotonic() - self._began
