"""Rank 0's desk, for what only one process does: handing out batches, the log, checkpoints, and when to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcore.algorithms import EstimatorInputs, Moments, rollout_metrics
from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing import split_minibatches
from rlcore.errors import RunFailed, UserError
from rlcore.protocols import RolloutSource, StepRollouts, Tracker, UpdateResult
from rlcore.runs.checkpoints import CheckpointStore
from rlcore.runs.directory import RunDirectory, Status
from rlcore.tracking.samples import pick_samples

CONTINUE = "continue"
INPUT_FIELDS = ("logprobs", "ref_logprobs", "rollout_logprobs", "kl", "values", "versions", "rollout_ids")


@dataclass(frozen=True)
class Outcome:
    """How training ended: `completed | early_stopped | interrupted`, after this many steps."""

    status: Status
    steps: int


class Desk:
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
    ) -> None:
        self.config, self.source, self.tracker = config, source, tracker
        self.directory, self.checkpoints = directory, checkpoints
        self.total_steps, self.interrupted = total_steps, interrupted
        self.step = 0
        self.episodes = 0
        self.minibatches: list[list[int]] = []
        self.reason: dict[str, Any] = {}        # why an early stop happened, for result.json
        self._rollouts: StepRollouts | None = None
        self._evaluation: dict[str, float] = {}
        self._seconds_before = 0.0              # of earlier incarnations
        self._began = time.monotonic()

    # --- batches --------------------------------------------------------------------------------------------------

    def rollouts(self, step: int) -> RolloutBatch:
        """Wait for the samples of `step` and cut them into optimizer steps."""
        self._rollouts = self.source.next_step(step)
        self._evaluation = {}
        batch = RolloutBatch.from_samples(self._rollouts.samples)
        self.minibatches = split_minibatches(
            batch.num_sequences,
            self.config.algorithm.minibatches,
            batch.vectors["group_ids"],
            seed=self.config.run.seed * 1_000_003 + step,
        )
        return batch

    def evaluate(self, step: int) -> None:
        self._evaluation, samples = self.source.evaluate()
        if step == 0:
            self.tracker.log(0, self._evaluation)
        self.tracker.show_samples(step, pick_samples(samples, self.config.tracking.show_samples))

    # --- the log and the decision ---------------------------------------------------------------------------------

    def end_step(
        self, step: int, batch: RolloutBatch, updates: Sequence[UpdateResult], seconds: Mapping[str, float]
    ) -> str:
        """Log `step`; `CONTINUE`, or the status that the run ends with."""
        assert self._rollouts is not None
        samples = self._rollouts.samples
        self.step, self.episodes = step, self.episodes + len(samples)
        metrics = self._metrics(step, batch, updates, seconds)
        self.tracker.log(step, metrics)
        if self.config.tracking.save_rollouts:
            advantages = [part.numpy() for part in batch.vectors["advantages"].split(batch.num_trainable_each)]
            self.directory.write_rollouts(step, samples, advantages)
        if step % self.config.tracking.show_every == 0 and not self.config.is_sft:
            self.tracker.show_samples(step, pick_samples(samples, self.config.tracking.show_samples))
        if self._kl_stop(metrics):
            return "early_stopped"
        if step >= self.total_steps:
            return "completed"
        return "interrupted" if self.interrupted() else CONTINUE

    def _metrics(
        self, step: int, batch: RolloutBatch, updates: Sequence[UpdateResult], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        assert self._rollouts is not None
        metrics: dict[str, float] = {
            "episode": self.episodes,
            "epoch": self._rollouts.epoch,
            **self._rollouts.metrics,
            **_update_metrics(updates, batch),
            **self._batch_metrics(batch),
            **self._evaluation,
            **{f"time/{phase}": value for phase, value in seconds.items()},
            "time/from_scratch": self._elapsed,
            "perf/tokens_per_second": len(batch.tokens) / seconds["step"],
        }
        if "generation" in seconds:
            metrics["perf/trainer_idle_fraction"] = seconds["generation"] / seconds["step"]
        return metrics

    def _batch_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        assert self._rollouts is not None
        samples, vectors = self._rollouts.samples, batch.vectors
        if self.config.is_sft:
            return {"val/sequence_lengths": float(batch.lengths.double().mean())}
        inputs = EstimatorInputs(
            cu_seqlens=batch.cu_seqlens,
            rewards=vectors["rewards"],
            group_ids=vectors["group_ids"],
            **{name: vectors[name] for name in INPUT_FIELDS if name in vectors},
        )
        versions = [span.version for sample in samples for span in sample.versions]
        correct = torch.tensor([float(s.metadata.get("correct", math.nan)) for s in samples])
        return rollout_metrics(
            inputs,
            finish_reasons=[sample.finish_reason for sample in samples],
            entropy=vectors.get("entropy"),
            correct=correct,
            returns=vectors.get("returns"),
            reward_coef=self.config.algorithm.kl.reward_coef,
            version=max(versions, default=None),
        )

    def _kl_stop(self, metrics: Mapping[str, float]) -> bool:
        """Strictly above the target stops; a KL that is no number fails the run."""
        training = self.config.training
        if not training.early_stopping or training.target_kl is None:
            return False
        kl = metrics.get("objective/kl")
        if kl is None or math.isnan(kl):
            raise RunFailed(f"early stopping: objective/kl of step {self.step} is {kl}, expected a number")
        if kl <= training.target_kl:
            return False
        self.reason = {"objective_kl": kl, "target_kl": training.target_kl}
        self.tracker.note(
            f"early stopping: objective/kl {kl:.6g} of step {self.step} is above "
            f"training.target_kl {training.target_kl:g}; saving and ending the run as a success"
        )
        return True

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder for every rank's shards."""
        return self.checkpoints.begin(step) / "model"

    def commit_checkpoint(self, step: int) -> None:
        """The state of rank 0 beside the shards, and the rename that makes both count."""
        assert self._rollouts is not None
        self.checkpoints.write_state(
            step,
            {
                "step": step,
                "episodes": self.episodes,
                "seconds": self._elapsed,
                "source": self._rollouts.snapshot,
                "tracker": self.tracker.state(),
            },
        )
        self.checkpoints.commit(step)

    def restore(self) -> str:
        """The folder of the newest whole checkpoint's shards, "" for a fresh start; rank 0's own state is taken from it.

        Raises:
            UserError: the run has already trained all its steps.
        """
        found = self.checkpoints.latest() if self.directory.resumed else None
        if found is None:
            self.directory.rewind(0)
            return ""
        if found.step >= self.total_steps:
            raise UserError(
                f"run {self.config.run.name!r} is complete at step {found.step} of {self.total_steps}: "
                "nothing is left to train; raise training.steps to go on"
            )
        self.step, self.episodes = found.step, int(found.state["episodes"])
        self._seconds_before = float(found.state["seconds"])
        self.source.restore(found.state["source"])
        self.checkpoints.rewind(found.step)
        self.directory.rewind(found.step)
        self.tracker.note(f"resuming after step {found.step} from {found.folder}")
        return str(found.model)

    # --- the end --------------------------------------------------------------------------------------------------

    def close(self, status: Status, *, reason: str = "") -> None:
        """Leave `result.json` behind and end the trackers."""
        self.directory.write_result(status, self.step, reason, seconds=self._elapsed, **self.reason)
        self.tracker.close(status)

    @property
    def _elapsed(self) -> float:
        return self._seconds_before + time.monotonic() - self._began


def _update_metrics(updates: Sequence[UpdateResult], batch: RolloutBatch) -> dict[str, float]:
    """Token means over all optimizer steps of the step; norms and rates of the last one.

    Where one optimizer step was all, and no pass came before it, its own KL and entropy are those of the batch.
    """
    if not updates:
        return {}
    moments = Moments()
    for update in updates:
        moments.merge(update.moments)
    metrics = {
        **updates[-1].metrics,
        **moments.reduce(optimizer_steps=len(updates)),
        "train/optimizer_steps": len(updates),
        "train/skipped_updates": sum(update.skipped for update in updates),
    }
    tokens_per_sequence = batch.num_trainable / sum(count > 0 for count in batch.num_trainable_each)
    if "rollout/kl" in metrics:
        metrics["objective/kl"] = metrics["rollout/kl"] * tokens_per_sequence
    if len(updates) == 1 and "policy/entropy_avg" in metrics:
        metrics["objective/entropy"] = metrics["policy/entropy_avg"] * tokens_per_sequence
    return metrics
