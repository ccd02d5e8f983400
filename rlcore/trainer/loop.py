"""The training loop. Every rank runs this page; rank 0 alone, at its `RankZero`, meets the
rollouts, the disk and the trackers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from torch import Tensor

from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.data.step import UpdateResult
from rlcore.errors import RunFailed
from rlcore.interfaces import PolicyBackend
from rlcore.runs.directory import Status
from rlcore.trainer.checkpointer import Checkpointer
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.engine_check import PASS, EngineCheck
from rlcore.trainer.gpu_sharing import GpuPhase, GpuSharing
from rlcore.trainer.rank0 import CATCH_UP, CONTINUE, FINISHED, READY, Outcome, RankZero
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.weight_publisher import WeightPublisher

logger = logging.getLogger(__name__)

# rank 0 keeps the limit of rollouts itself, and knows which engine it waits for
GRACE_S = 60.0


@dataclass
class Trainer:
    """The parts of a run, as one rank sees them."""

    config: Config
    sync: RankSync
    backend: PolicyBackend
    credit: CreditAssignment
    total_steps: int
    publisher: WeightPublisher | None  # None: nothing generates (sft, replay)
    rank0: RankZero | None  # rank 0 only
    # None: the engines, if there are any, have GPUs of their own
    sharing: GpuSharing | None = None
    # since the last row of the log, by phase
    seconds: dict[str, float] = field(default_factory=dict)
    # why engines cannot go on, on every rank; what was trained is saved then
    stranded: str = ""
    checkpointer: Checkpointer = field(init=False)
    engine_check: EngineCheck | None = field(init=False)

    def __post_init__(self) -> None:
        self.engine_check = EngineCheck.of(self.config)
        self.checkpointer = Checkpointer(
            self.sync, self.backend, self.rank0, timeout_s=self.patience
        )

    # --- the loop ---------------------------------------------------------------------------------

    def train(self) -> Outcome:
        self.switch_to(GpuPhase.TRAINING)
        step, status = self.resume()
        if status == CONTINUE:
            self.publish(step)
        if step == 0:
            self.evaluate(0)
            self.log(0)
        self.seconds = {}
        while status == CONTINUE and not self.stranded:
            with self.clock("step"):
                batch = self.load_rollouts(step + 1)
                if self.stranded:
                    break
                step += 1
                self.score(step, batch)
                self.assign_credit(step, batch)
                updates = self.update(step)
                self.publish(step)
            status = self.end_step(step, batch, updates)
            if status in FINISHED or every(step, self.config.evaluation.every):
                self.evaluate(step)
            self.poll_checkpoint()
            self.log(step)
            logger.info(
                "step %d: %s",
                step,
                ", ".join(f"{phase} {spent:.3f} s" for phase, spent in self.seconds.items()),
            )
            self.seconds = {}
            if status != CONTINUE or every(step, self.config.checkpoint.every):
                self.save(
                    step, in_background=status == CONTINUE and self.config.checkpoint.async_save
                )
        if self.stranded:
            self.give_up(step, status)
        return Outcome(cast(Status, status), step)

    # --- its parts --------------------------------------------------------------------------------

    def load_rollouts(self, step: int) -> RolloutBatch | None:
        """The step's samples, laid out over the ranks; the whole batch on rank 0."""
        self.switch_to(GpuPhase.GENERATING)
        with self.clock("generation"):
            self.wait_for_engines(f"the rollouts of step {step}", lambda: self.main.generated(step))
        if self.stranded:
            return None
        self.switch_to(GpuPhase.TRAINING)
        with self.clock("transfer"):
            batch = self.sync.run_on_rank0(
                f"the batch of step {step}",
                lambda: self.main.rollouts(step, self.version),
                timeout_s=self.patience,
            )
            plans = None if batch is None else self.backend.plan(batch, self.main.minibatches)
            self.backend.load_batch(batch, plans)
        return batch

    def score(self, step: int, batch: RolloutBatch | None) -> None:
        """The passes that must come before the update, and only those."""
        with self.clock("logprobs"):
            if self.credit.needs_logprobs:
                put(batch, self.backend.score("policy", entropy=True))
            elif self.engine_check is not None and self.engine_check.is_due(step):
                put(batch, self.backend.score("policy"), prefix=PASS)
            if self.credit.needs_reference:
                put(batch, self.backend.score("reference"), prefix="ref_")
            if self.credit.needs_teacher:
                put(batch, self.backend.score("teacher"), prefix="teacher_")
            if self.credit.needs_critic:
                put(batch, self.backend.score("critic"))

    def assign_credit(self, step: int, batch: RolloutBatch | None) -> None:
        def assign() -> dict[str, Tensor]:
            self.main.compare_logprobs(step, present(batch), self.engine_check)
            return self.credit.assign(present(batch), self.main.minibatches)

        with self.clock("advantages"):
            self.backend.assign(
                self.sync.run_on_rank0("the advantages", assign, timeout_s=self.patience)
            )

    def update(self, step: int) -> list[UpdateResult]:
        """Epochs x mini-batches of optimizer steps; `training.max_update_kl` ends them early, on
        all ranks alike.
        """
        algorithm = self.config.algorithm
        limit = self.config.training.max_update_kl
        train_policy = not (self.credit.needs_critic and step <= self.config.critic.warmup_steps)
        results: list[UpdateResult] = []
        if self.config.training.debug == "rollout_only":
            return results
        with self.clock("training"):
            for _ in range(algorithm.epochs):
                for k in range(algorithm.minibatches):
                    results.append(self.backend.update(k, train_policy=train_policy))
                    if (
                        limit is not None
                        and results[-1].metrics.get("policy/approxkl_avg", 0.0) > limit
                    ):
                        return results
        return results

    def publish(self, step: int) -> None:
        if self.publisher is not None:
            self.switch_to(GpuPhase.HANDOVER)
            with self.clock("publish"):
                self.stranded = self.publisher.publish(step)

    def evaluate(self, step: int) -> None:
        if self.config.evaluation.paths and self.publisher is not None and not self.stranded:
            self.switch_to(GpuPhase.GENERATING)
            with self.clock("evaluation"):
                self.wait_for_engines(
                    f"the evaluation after step {step}", lambda: self.main.evaluated()
                )

    def wait_for_engines(self, what: str, wait: Callable[[], str]) -> None:
        """Rank 0 waits for generation; an engine that was started again gets the weights meanwhile."""
        limit = self.config.rollout.timeout_s + GRACE_S
        while (word := self.sync.broadcast(what, wait, timeout_s=limit)) == CATCH_UP:
            assert self.publisher is not None
            self.switch_to(GpuPhase.HANDOVER)
            if why := self.publisher.catch_up():
                word = why
                break
            self.switch_to(GpuPhase.GENERATING)
        self.stranded = "" if word == READY else word

    def give_up(self, step: int, status: str) -> None:
        """Engines cannot go on: keep what was trained, then fail with the reason. Nobody needs them
        where all is done.
        """
        if status in FINISHED and not self.config.evaluation.paths:
            note = f"WARNING no engine has the weights of step {step}, the last: {self.stranded}"
            self.sync.run_on_rank0(
                "a last word", lambda: self.main.tracker.note(note), timeout_s=self.patience
            )
            return
        self.switch_to(GpuPhase.HANDOVER)
        kept = self.checkpointer.keep(step)

        def fail() -> None:
            raise RunFailed(f"{self.stranded}; {kept}")

        self.sync.run_on_rank0("the end without engines", fail, timeout_s=self.patience)

    def end_step(self, step: int, batch: RolloutBatch | None, updates: list[UpdateResult]) -> str:
        """Measure the step; every rank learns whether to go on."""
        self.sync.announce_interrupt()
        return self.sync.broadcast(
            f"the end of step {step}",
            lambda: self.main.end_step(step, present(batch), updates, self.seconds),
            timeout_s=self.patience,
        )

    def log(self, step: int) -> None:
        self.sync.run_on_rank0(
            f"the log of step {step}",
            lambda: self.main.log(step, self.seconds),
            timeout_s=self.patience,
        )

    def save(self, step: int, *, in_background: bool) -> None:
        self.switch_to(GpuPhase.HANDOVER)
        with self.clock("checkpoint"):
            self.count_write(self.checkpointer.save(step, in_background=in_background))

    def poll_checkpoint(self) -> None:
        if self.checkpointer.is_writing:
            with self.clock("checkpoint"):
                self.count_write(self.checkpointer.poll())

    def count_write(self, seconds: float | None) -> None:
        if seconds is not None:
            self.seconds["checkpoint_write"] = self.seconds.get("checkpoint_write", 0.0) + seconds

    def resume(self) -> tuple[int, str]:
        """The step to continue after, 0 or that of the newest whole checkpoint, whose weights are
        loaded; and whether to.
        """
        folder = self.sync.broadcast(
            "looking for a checkpoint", lambda: self.main.restore(), timeout_s=self.patience
        )
        if folder:
            self.backend.load(Path(folder))
        # Only now, when nothing can be refused any more, is what came after the checkpoint given
        # up.
        step, status = self.sync.broadcast(
            "going on", lambda: self.main.go_on(), timeout_s=self.patience
        ).split()
        self.checkpointer.newest = int(step)
        return int(step), status

    # --- small things -----------------------------------------------------------------------------

    @property
    def main(self) -> RankZero:
        if self.rank0 is None:
            raise AssertionError(
                "only rank 0 has it; call it inside RankSync.main or RankSync.decide"
            )
        return self.rank0

    @property
    def version(self) -> int | None:
        """Of the policy as it is before the update, on rank 0; None where nothing is published."""
        return None if self.publisher is None else self.publisher.version

    @property
    def patience(self) -> float:
        """Seconds that other ranks wait for rank 0 where it only computes or writes."""
        return self.config.cluster.collective_timeout_s

    def switch_to(self, phase: GpuPhase) -> None:
        """Make it `phase` on GPUs that trainer and engines share."""
        if self.sharing is not None:
            with self.clock("handover"):
                self.sharing.switch_to(phase)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        self.sync.doing = phase
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def present(batch: RolloutBatch | None) -> RolloutBatch:
    """The batch, on the one rank that has it."""
    if batch is None:
        raise AssertionError("only rank 0 holds the whole batch")
    return batch


def put(
    batch: RolloutBatch | None, scores: Mapping[str, Tensor] | None, *, prefix: str = ""
) -> None:
    if batch is not None and scores is not None:
        for name, value in scores.items():
            batch.set(prefix + name, value)
