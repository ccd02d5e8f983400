"""The training loop. Every rank runs it.

Only rank 0 handles rollouts, the disk and the trackers, through `RankZero`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from torch import Tensor

from rlcore.config import Config
from rlcore.config.evaluation_sets import evaluation_sets, sets_due
from rlcore.data.batch import RolloutBatch, UpdateResult
from rlcore.data.packing.plan import plan_minibatches
from rlcore.deadlines import STEP_GRACE_S
from rlcore.errors import RunFailed
from rlcore.interfaces import PolicyBackend
from rlcore.runs.directory import RunDirectory, Status
from rlcore.timeline.recorder import RECORDER, now
from rlcore.timeline.start import START
from rlcore.trainer.checkpointer import Checkpointer, folder_inside
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.engine_check import PASS, EngineCheck
from rlcore.trainer.gpu_sharing import GpuPhase, GpuSharing
from rlcore.trainer.held_out import HeldOutRows
from rlcore.trainer.rank0 import CATCH_UP, CONTINUE, FINISHED, READY, Outcome, RankZero
from rlcore.trainer.rank_sync import RankSync, on_rank0
from rlcore.trainer.weight_publisher import WeightPublisher

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """The parts of a run, as seen by one rank."""

    config: Config
    sync: RankSync
    backend: PolicyBackend
    credit: CreditAssignment
    total_steps: int
    publisher: WeightPublisher | None  # None: nothing generates (sft, replay)
    rank0: RankZero | None  # rank 0 only
    sharing: GpuSharing | None = None  # None: the engines, if any, have GPUs of their own
    replay_from: Path | None = None  # the shards that a replay starts from
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, since the last log row
    # Why the run must stop, although it can still be saved: no engine is left, or too many rollouts
    # or rewards fail. The same on every rank; "" as long as the run can continue.
    stop_reason: str = ""
    start_s: float | None = field(init=False, default=None)  # until the first publication
    checkpoints: Path = field(init=False)
    checkpointer: Checkpointer = field(init=False)
    engine_check: EngineCheck | None = field(init=False)

    def __post_init__(self) -> None:
        self.engine_check = EngineCheck.of(self.config)
        run = self.config.run
        self.checkpoints = RunDirectory(Path(run.dir) / run.name).checkpoints
        self.checkpointer = Checkpointer(self.sync, self.backend, self.rank0, self.checkpoints)

    # --- the loop ---------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Train until the last step, an early stop, a signal, or a reason to save and fail."""
        self.switch_to(GpuPhase.TRAINING)
        step, status = self.resume()
        if status == CONTINUE:
            with START.phase("publication"):
                self.publish(step)
        self.end_start()
        if step == 0:
            self.evaluate(0)
            self.log(0)
            self.find_best(0)
            self.end_row(0)
        self.seconds = {}
        # The publication of a resumed run belongs to no step.
        RECORDER.drop()
        self.record_start()
        while status == CONTINUE and not self.stop_reason:
            with self.clock("step"):
                batch = self.load_rollouts(step + 1)
                if self.stop_reason:
                    break
                step += 1
                self.score(step, batch)
                updates = self.update(step, self.credit_of(step, batch))
                self.measure_distance(updates)
                self.record_updates(batch, updates)
                self.publish(step)
            status = self.end_step(step, batch, updates)
            self.evaluate(step, ended=status in FINISHED)
            self.poll_checkpoint()
            self.log(step)
            logger.info(
                "step %d: %s",
                step,
                ", ".join(f"{phase} {spent:.3f} s" for phase, spent in self.seconds.items()),
            )
            self.end_row(step)
            is_due = status != CONTINUE or every(step, self.config.checkpoint.every)
            if self.find_best(step) or is_due:
                self.save(
                    step, in_background=status == CONTINUE and self.config.checkpoint.async_save
                )
        if self.stop_reason:
            self.save_and_fail(step, status)
        return Outcome(cast(Status, status), step)

    # --- phases of a step -------------------------------------------------------------------------

    def load_rollouts(self, step: int) -> RolloutBatch | None:
        """Distribute the samples of the step over the ranks. Returns the whole batch on rank 0."""
        self.switch_to(GpuPhase.GENERATING)
        with self.clock("generation"):
            self.wait_for_engines(
                f"the rollouts of step {step}", lambda: on_rank0(self.rank0).generate(step)
            )
        if self.stop_reason:
            return None
        self.switch_to(GpuPhase.TRAINING)
        with self.clock("transfer"):
            batch = self.sync.run_on_rank0(
                f"the batch of step {step}",
                lambda: on_rank0(self.rank0).build_batch(
                    step, self.version, reward_parts=self.credit.reward_parts
                ),
            )
            plans = None
            if batch is not None:
                rank0 = on_rank0(self.rank0)
                plans = rank0.plans = plan_minibatches(
                    self.backend.plan_rules, batch, rank0.minibatches
                )
            self.backend.load_batch(batch, plans)
        return batch

    def score(self, step: int, batch: RolloutBatch | None) -> None:
        """Run the scoring passes that the update needs."""
        with self.clock("logprobs"):
            if self.credit.passes.policy:
                put(batch, self.backend.score("policy", entropy=True))
            elif self.engine_check is not None and self.engine_check.is_due(step):
                put(batch, self.backend.score("policy"), prefix=PASS)
            if self.credit.passes.reference:
                put(batch, self.backend.score("reference"), prefix="ref_")
            if self.credit.passes.teacher:
                put(batch, self.backend.score("teacher"), prefix="teacher_")
            if self.credit.passes.critic:
                put(batch, self.backend.score("critic"))

    def credit_of(self, step: int, batch: RolloutBatch | None) -> dict[str, Tensor] | None:
        """Compute advantages and loss weights; returns them on rank 0."""

        def assign() -> dict[str, Tensor]:
            rank0 = on_rank0(self.rank0)
            rank0.compare_logprobs(step, on_rank0(batch), self.engine_check)
            return self.credit.assign(on_rank0(batch), rank0.minibatches)

        with self.clock("advantages"):
            return self.sync.run_on_rank0("the advantages", assign)

    def update(self, step: int, credit: dict[str, Tensor] | None) -> list[UpdateResult]:
        """Send the credit to the ranks and take epochs x mini-batches optimizer steps.

        `training.max_update_kl` ends them early, on all ranks alike.
        """
        algorithm = self.config.algorithm
        limit = self.config.training.max_update_kl
        train_policy = not (self.credit.passes.critic and step <= self.config.critic.warmup_steps)
        results: list[UpdateResult] = []
        with self.clock("advantages"):
            self.backend.assign(credit)
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

    def measure_distance(self, updates: list[UpdateResult]) -> None:
        """Add the distance that the policy moved in this step to the last update's metrics."""
        if updates and not self.config.learns_from_rows:
            with self.clock("logprobs"):
                updates[-1].moments.merge(self.backend.step_distance())

    def record_updates(self, batch: RolloutBatch | None, updates: list[UpdateResult]) -> None:
        """Gather each token's results of the updates, if the step is recorded.

        A step that only compares the policy with itself has nothing to record.
        """
        config = self.config
        compares = self.credit.passes.policy or config.algorithm.old_logprobs == "rollout"
        if updates and compares and config.tracking.save_rollouts and not config.learns_from_rows:
            with self.clock("transfer"):
                put(batch, self.backend.updated_vectors())

    def publish(self, step: int) -> None:
        """Send the weights after `step` to all engines, if there are any."""
        if self.publisher is not None:
            self.switch_to(GpuPhase.HANDOVER)
            with self.clock("publish"):
                self.stop_reason = self.publisher.publish(step)

    def evaluate(self, step: int, *, ended: bool = False) -> None:
        """Score the held-out prompt sets that are due, with the weights after `step`."""
        due = sets_due(self.config, step, ended=ended)
        if due and self.config.learns_from_rows:
            self.score_rows(due)
        if not due or self.publisher is None or self.stop_reason:
            return
        self.switch_to(GpuPhase.GENERATING)
        with self.clock("evaluation"):
            self.wait_for_engines(
                f"the evaluation after step {step}", lambda: on_rank0(self.rank0).evaluate(due)
            )

    @property
    def held_out(self) -> HeldOutRows:
        """The rows of evaluation sets, on rank 0."""
        return on_rank0(on_rank0(self.rank0).held_out)

    def score_rows(self, sets: Sequence[str]) -> None:
        """Score held-out rows by passes over their answers."""
        self.switch_to(GpuPhase.TRAINING)
        prefixes = {one.name: one.prefix for one in evaluation_sets(self.config)}
        with self.clock("evaluation"):
            counts = self.sync.broadcast(
                "the sizes of evaluation sets",
                lambda: " ".join(str(self.held_out.count(name)) for name in sets),
            )
            for name, count in zip(sets, counts.split()):
                for index in range(int(count)):
                    self.score_held_out(name, index, prefixes[name])
            self.sync.run_on_rank0("the evaluation", lambda: on_rank0(self.rank0).end_scoring(sets))

    def score_held_out(self, name: str, index: int, prefix: str) -> None:
        """Score one batch of an evaluation set, and measure it on rank 0."""
        what = f"batch {index} of evaluation set {name!r}"
        batch = self.sync.run_on_rank0(what, lambda: self.held_out.batch(name, index))
        plans = None
        if batch is not None:
            plans = plan_minibatches(self.backend.plan_rules, batch, [range(batch.num_sequences)])
        self.backend.load_batch(batch, plans)
        put(batch, self.backend.score("policy"))
        if self.credit.passes.reference:
            put(batch, self.backend.score("reference"), prefix="ref_")

        def measure() -> None:
            self.held_out.add(prefix, self.credit.measure(on_rank0(batch)))

        self.sync.run_on_rank0(f"the measurements of {what}", measure)

    def find_best(self, step: int) -> bool:
        """Whether the evaluation after `step` is the best so far; its weights are then kept."""
        if self.config.checkpoint.best is None:
            return False
        answer = self.sync.broadcast(
            f"the best checkpoint by step {step}",
            lambda: "found" if on_rank0(self.rank0).find_best(step) else "",
        )
        return bool(answer)

    def wait_for_engines(self, what: str, wait: Callable[[], str]) -> None:
        """Wait for generation on rank 0, and send the weights to engines that restarted meanwhile.

        Args:
            wait: returns `READY`, `CATCH_UP` if a restarted engine needs the weights, or the reason
                why the run must stop.
        """
        limit = self.config.rollout.timeout_s + STEP_GRACE_S
        while (answer := self.sync.broadcast(what, wait, timeout_s=limit)) == CATCH_UP:
            assert self.publisher is not None
            self.switch_to(GpuPhase.HANDOVER)
            if reason := self.publisher.catch_up():
                answer = reason
                break
            self.switch_to(GpuPhase.GENERATING)
        self.stop_reason = "" if answer == READY else answer

    def save_and_fail(self, step: int, status: str) -> None:
        """Save the trained state, then fail. A completed run gets a warning instead."""
        reason = self.stop_reason
        if status in FINISHED and not sets_due(self.config, step, ended=True):
            note = f"WARNING no engine has the weights of step {step}, the last: {reason}"
            self.sync.run_on_rank0("the warning", lambda: on_rank0(self.rank0).tracker.note(note))
            return
        self.switch_to(GpuPhase.HANDOVER)
        saved = self.checkpointer.save_before_failing(step)

        def fail() -> None:
            raise RunFailed(f"{reason}; {saved}")

        self.sync.run_on_rank0("the end of a run that must stop", fail)

    def end_step(self, step: int, batch: RolloutBatch | None, updates: list[UpdateResult]) -> str:
        """Measure the step. Returns `CONTINUE`, or the status that ends the run."""
        self.sync.announce_interrupt()
        return self.sync.broadcast(
            f"the end of step {step}",
            lambda: on_rank0(self.rank0).end_step(step, on_rank0(batch), updates, self.seconds),
        )

    def log(self, step: int) -> None:
        """Write the metrics of `step` and its evaluation."""
        with self.sync.span("log"):
            self.sync.run_on_rank0(
                f"the log of step {step}", lambda: on_rank0(self.rank0).log(step, self.seconds)
            )

    def end_row(self, step: int) -> None:
        """Start the times of the next row, in both metrics and timeline."""
        self.seconds = {}
        RECORDER.flush(step)

    def end_start(self) -> None:
        """Log how long the start took, by phase."""
        self.start_s = START.finish()
        if self.start_s is None:
            return
        line = START.line(self.start_s)
        if self.rank0 is None:
            logger.info("%s", line)
        else:
            self.rank0.tracker.note(line)

    def record_start(self) -> None:
        """Count the start in the first row, and add its phases to the timeline."""
        if self.start_s is None:
            return
        self.seconds["start"] = self.start_s
        for name, began, ended in START.spans:
            RECORDER.add((self.sync.track[0], "start"), name, began, ended)

    def save(self, step: int, *, in_background: bool) -> None:
        """Save a checkpoint of `step`."""
        self.switch_to(GpuPhase.HANDOVER)
        with self.clock("checkpoint"):
            self.count_write(self.checkpointer.save(step, in_background=in_background))

    def poll_checkpoint(self) -> None:
        """Commit the background checkpoint, if every rank has finished writing."""
        if self.checkpointer.is_writing:
            with self.clock("checkpoint"):
                self.count_write(self.checkpointer.poll())

    def count_write(self, seconds: float | None) -> None:
        """Add the time that a background checkpoint took, once it is known."""
        if seconds is not None:
            self.seconds["checkpoint_write"] = self.seconds.get("checkpoint_write", 0.0) + seconds

    def resume(self) -> tuple[int, str]:
        """Load the newest whole checkpoint, if there is one.

        Returns:
            The step to continue after (0 without a checkpoint), and `CONTINUE`, or the final status
            if no step is left to train.
        """
        folder = self.sync.broadcast(
            "looking for a checkpoint", lambda: on_rank0(self.rank0).restore()
        )
        if folder:
            given = [] if self.replay_from is None else [self.replay_from]
            with START.phase("checkpoint"):
                self.backend.load(folder_inside([self.checkpoints, *given], folder))
        # Delete the records of later steps only now, when nothing can be refused any more.
        step, status = self.sync.broadcast("resuming", lambda: on_rank0(self.rank0).begin()).split()
        # Without a checkpoint the evaluation before training, step 0, runs again too.
        RECORDER.begin(int(step) or -1)
        self.checkpointer.newest = int(step)
        return int(step), status

    # --- helpers ----------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version of the weights before the update, on rank 0; None if nothing publishes."""
        return None if self.publisher is None else self.publisher.version

    def switch_to(self, phase: GpuPhase) -> None:
        """Give the GPUs to `phase`, if trainer and engines share them."""
        if self.sharing is not None:
            with self.clock("handover"):
                self.sharing.switch_to(phase)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `seconds[phase]`."""
        self.sync.doing = phase
        start = now()
        yield
        end = now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + end - start
        RECORDER.add(self.sync.track, phase, start, end)


def every(step: int, period: int) -> bool:
    """Whether `step` is a multiple of `period`; a period of 0 means never."""
    return period > 0 and step % period == 0


def put(
    batch: RolloutBatch | None, scores: Mapping[str, Tensor] | None, *, prefix: str = ""
) -> None:
    """Store the results of a scoring pass in the batch, on rank 0."""
    if batch is not None and scores is not None:
        for name, value in scores.items():
            batch.set(prefix + name, value)
