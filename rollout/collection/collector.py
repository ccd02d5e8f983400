"""Collects the groups that each step trains on.

`rollout.max_staleness` says when they are made. At 0, in lock-step, the groups of a step are made
when the trainer asks for the step, in whole batches: engines are idle during training, and nothing
is left over for a later step. Above 0, groups are made during training, up to that many policy
steps ahead. A publication, a hand-over and an engine with room each make the collector look for
groups to start. Finished groups wait in the buffer for their step, and an error is raised at the
trainer's next call.

`rollout/collection/staleness_scheduler.py` decides how many groups are started and which of them a
step gets; this module carries out its decisions. Everything runs on the rollout loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rlcore.config import Config
from rlcore.deadlines import CANCEL_S
from rlcore.errors import EmptyBatch, TooManyFailed
from rlcore.timeline.recorder import RECORDER
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.buffer import (
    BufferedGroup,
    DropCounts,
    PublishedVersions,
    Snapshot,
    StepGroups,
    restore_groups,
)
from rollout.collection.filters import STALE, FilterChain
from rollout.collection.group_runner import Group, GroupRunner
from rollout.collection.staleness_scheduler import Rules, Scheduler

logger = logging.getLogger(__name__)

UNSCORED = "reward"  # failure kind in the ledger of a group with too few scores
DRAWS_PER_GROUP = 16  # a step fails after this many draws for each group that it needs


class Collector:
    """Starts groups, keeps the finished ones, and hands them over step by step.

    Args:
        steps: number of steps of the run; no later step is prepared.
        busy_seconds: seconds so far in which any engine had work.
    """

    def __init__(
        self,
        config: Config,
        queue: PromptQueue,
        runner: GroupRunner,
        filters: FilterChain,
        versions: PublishedVersions,
        *,
        steps: int,
        busy_seconds: Callable[[], float],
    ) -> None:
        rollout = config.rollout
        self._config = rollout
        self._max_rewards_failed = config.reward.max_failed
        self._lockstep = rollout.max_staleness == 0
        self._whole_batches = self._lockstep or runner.batched
        self._queue = queue
        self._runner = runner
        self._filters = filters
        self._versions = versions
        self._steps = steps
        self._busy_seconds = busy_seconds
        self._rules = Rules(rollout.prompts_per_step, rollout.max_staleness, rollout.oversample)
        self._scheduler = Scheduler(self._rules)
        # finished groups by draw
        self._buffer: dict[int, BufferedGroup] = {}
        # the task of each draw in flight; draws of a whole batch share one task
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # cancelled tasks that have not ended, and the reason
        self._given_up: dict[asyncio.Task[None], str] = {}
        # counts since the last hand-over
        self._counts = DropCounts()
        self._failure: BaseException | None = None
        # replaced whenever it is set
        self._news = asyncio.Event()
        self._woken = False
        self._halted = True
        # (start of the measurement, busy seconds of the engines at that time)
        self._measured_from: tuple[float, float] | None = None

    # --- calls of the trainer ---------------------------------------------------------------------

    async def collect(self, step: int) -> StepGroups:
        """The groups that `step` trains on, once the scheduler gives them.

        Raises errors of engines, workflows, rewards and filters since the last call. In lock-step
        the draws of the step are requeued then; otherwise generation continues.
        """
        if step != self._scheduler.steps_done + 1:
            raise ValueError(
                f"step {step} was asked for, step {self._scheduler.steps_done + 1} is the next"
            )
        if self._lockstep:
            self._generate_with(step - 1)
        try:
            while True:
                if (failure := self._failure) is not None:
                    self._failure = None
                    self.wake()
                    raise failure
                if (chosen := self._scheduler.batch()) is not None:
                    return self._hand_over(sorted(chosen))
                await self._news.wait()
        except BaseException:
            if self._lockstep:
                await self.halt()
                self._buffer.clear()
                self._queue.give_back_unsettled()
                self._begin_behind(self._queue.ledger.last_step)
            raise

    def published(self, step: int) -> None:
        """Record that engines have the weights of policy step `step`.

        Generation starts or continues with them; in lock-step once the next step is requested.
        """
        if not self._lockstep:
            self._generate_with(step)

    def describe_wait(self) -> str:
        """Name what the collector waits for, for error messages."""
        scheduler = self._scheduler
        if self._lockstep:
            return self._runner.describe_wait()
        if self._halted:
            return "weights to be published"
        if waits_for := scheduler.must_wait_for():
            return self._runner.describe_wait(set(waits_for))
        there = (
            f"{scheduler.num_finished} groups are finished and {scheduler.num_in_flight} in flight"
        )
        return f"{there}: {self._runner.dispatcher.fleet.describe_wait() or 'no engine has room'}"

    # --- starting groups --------------------------------------------------------------------------

    def _generate_with(self, policy_step: int) -> None:
        self._halted = False
        if self._lockstep or self._measured_from is None:
            self._measured_from = (time.perf_counter(), self._busy_seconds())
        self._scheduler.published(policy_step)
        self.wake()

    def wake(self) -> None:
        """Start groups soon, if there is room; several calls in one loop iteration count once."""
        if not self._woken and not self._halted:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._woken = False
        if self._halted or self._failure is not None:
            return
        with self._errors_kept():
            count = self._wanted()
            if count > 0:
                self._begin(self._queue.take(count))

    def _wanted(self) -> int:
        """Number of groups for which scheduler, engines and remaining steps have room.

        A group is started only if engines begin it at once: it would only age in an engine's queue.
        In lock-step: the size of the next batch; raises EmptyBatch after too many draws.
        """
        scheduler = self._scheduler
        if self._lockstep:
            count = 0 if self._tasks else scheduler.room()
            left = DRAWS_PER_GROUP * self._rules.groups_per_step - self._counts.draws
            if count > 0 and left <= 0:
                raise self._too_little()
            return min(count, left)
        places = (self._steps - scheduler.steps_done) * self._rules.groups_per_step
        left = math.ceil((places - scheduler.num_finished) * self._rules.oversample)
        return min(
            scheduler.room(),
            left - scheduler.num_in_flight,
            self._runner.room(self._config.samples_per_prompt),
        )

    def _begin(self, draws: Sequence[int]) -> None:
        self._counts.draws += len(draws)
        self._scheduler.started(draws)
        for batch in [draws] if self._whole_batches else [[draw] for draw in draws]:
            task = asyncio.get_running_loop().create_task(self._make(batch))
            self._tasks |= dict.fromkeys(batch, task)
            task.add_done_callback(partial(self._ended, batch))

    # --- outcomes ---------------------------------------------------------------------------------

    async def _make(self, draws: Sequence[int]) -> None:
        """Make finished groups from prompts."""
        prompts = {draw: self._queue.prompt(draw) for draw in draws}
        for group in await self._runner.run(prompts):
            # skip draws that a halt has taken from this task
            if self._tasks.get(group.draw) is asyncio.current_task():
                self._finish_group(group)
        self._check_failures()

    def _ended(self, draws: Sequence[int], task: asyncio.Task[None]) -> None:
        """Requeue draws for which `task` made no group, and keep its error for the trainer.

        This runs in a callback, since a task that is cancelled before its first step runs no code.
        The error of a task that was given up is only logged.
        """
        with self._errors_kept():
            for draw in draws:
                # their samples are missing or useless
                if self._tasks.get(draw) is task:
                    self._draw_again(draw)
        given_up = self._given_up.pop(task, None) is not None
        if not task.cancelled() and (error := task.exception()) is not None:
            if given_up:
                logger.warning(
                    "draws %s were given up, and their task then failed: %s", draws, error
                )
            else:
                self._failed(error)
        self._tell()
        self.wake()

    @contextmanager
    def _errors_kept(self) -> Iterator[None]:
        """Keep a callback's error for the trainer; the event loop would only log it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - recovery: of the journal, say; raised at the trainer's next call
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._tell()

    def _finish_group(self, group: Group) -> None:
        """Keep a group, drop it as filtered or failed, or requeue its draw."""
        draw = group.draw
        scheduler = self._scheduler
        self._counts.rewards.add(group.rewards)
        if group.aborted:
            self._counts.requeued += 1
            self._draw_again(draw)
            self._check_yield()
            return
        if not group.samples:
            self._queue.fail(draw, group.failures[0].kind if group.failures else UNSCORED)
            del self._tasks[draw]
            scheduler.dropped(draw)
            self._counts.failures += group.failures
            self._counts.unscored += not group.failures
            self._check_yield()
            return
        refused_by = self._filters.refusal(group.samples)
        self._queue.finish(draw, group.samples)
        del self._tasks[draw]
        if refused_by is not None:
            self._queue.drop(draw, refused_by)
            scheduler.dropped(draw)
            self._counts.dropped[refused_by] += 1
        elif self._lockstep and len(self._buffer) == self._rules.groups_per_step:
            self._queue.give_back(draw)
            scheduler.dropped(draw)
            self._counts.requeued += 1
        else:
            buffered = self._aged(group, scheduler.policy_step)
            self._buffer[draw] = buffered
            scheduler.finished(draw, buffered.oldest)
            self._give_up_stale()
        self._check_yield()

    def _aged(self, group: Group, now: int) -> BufferedGroup:
        """The group with the policy steps of its tokens.

        An unknown version belongs to the publication in progress. It counts as the current step for
        the age limit, and as the next step when rolling back. In lock-step every token is current.
        """
        if self._lockstep:
            return BufferedGroup(group, now, now)
        samples = (*group.samples, *group.greedy)
        made = [
            self._versions.of(span.version)
            for sample in samples
            for span in sample.versions
            if span.end > span.start
        ]
        oldest = min(
            (now if publication is None else publication.step for publication in made), default=now
        )
        newest = max(
            (now + 1 if publication is None else publication.step for publication in made),
            default=now,
        )
        return BufferedGroup(group, oldest, newest)

    def _give_up_stale(self) -> None:
        """Requeue draws that no step may train on; draws in flight once they have ended."""
        for draw in self._scheduler.expired():
            if draw in self._buffer:
                del self._buffer[draw]
                self._scheduler.dropped(draw)
                self._queue.give_back(draw, STALE)
                self._counts.dropped[STALE] += 1
            # draws of a whole batch end together, so they are not cancelled alone
            elif not self._whole_batches and self._tasks[draw] not in self._given_up:
                self._give_up(self._tasks[draw], STALE)

    def _give_up(self, task: asyncio.Task[None], reason: str = "") -> None:
        # a task that cannot be cancelled has ended by itself
        if task.cancel():
            self._given_up.setdefault(task, reason)

    def _draw_again(self, draw: int) -> None:
        """Requeue a draw that is no longer in flight and has no samples."""
        reason = self._given_up.get(self._tasks.pop(draw), "")
        if reason:
            self._counts.dropped[reason] += 1
        self._scheduler.dropped(draw)
        self._queue.give_back(draw, reason)

    def _check_failures(self) -> None:
        """Raise TooManyFailed as `rollout.max_failed` and `reward.max_failed` say."""
        counts = self._counts
        step = self._scheduler.steps_done + 1
        groups = self._rules.groups_per_step
        samples = groups * self._config.samples_per_prompt
        try:
            counts.check_rollouts(step, groups, self._config.max_failed)
            counts.check_rewards(step, samples, self._max_rewards_failed)
        except TooManyFailed:
            self._counts = DropCounts()
            raise

    def _check_yield(self) -> None:
        """Raise EmptyBatch if filters or the age limit leave too few groups for a step."""
        counts = self._counts
        wanted = self._rules.groups_per_step
        lost = counts.dropped.total() + counts.requeued + counts.given_up
        if len(self._buffer) < wanted and lost >= DRAWS_PER_GROUP * wanted:
            raise self._too_little()

    def _too_little(self) -> EmptyBatch:
        counts = self._counts
        self._counts = DropCounts()
        found = len(self._buffer)
        return counts.too_little(self._scheduler.steps_done + 1, found, self._rules.groups_per_step)

    # --- hand-over --------------------------------------------------------------------------------

    def _hand_over(self, chosen: Sequence[int]) -> StepGroups:
        groups = [self._buffer.pop(draw).group for draw in chosen]
        self._scheduler.hand_over(chosen)
        self._give_up_stale()
        self._queue.hand_over(chosen, self._scheduler.steps_done)
        metrics = self._measured() | self._queue.stream.metrics()
        unused = self._scheduler.num_finished + self._scheduler.num_in_flight
        stream = self._queue.stream
        epoch = stream.epoch - unused / stream.size
        counts = self._counts
        self._counts = DropCounts()
        RECORDER.instant(
            ("rollouts", "hand-over"),
            f"step {self._scheduler.steps_done}",
            groups=len(groups),
            dropped=counts.dropped.total(),
            requeued=counts.requeued,
        )
        RECORDER.counter("rollouts", "buffered groups", self._scheduler.num_finished)
        RECORDER.counter("rollouts", "groups in flight", self._scheduler.num_in_flight)
        self._halted = self._lockstep
        self.wake()
        return StepGroups(groups, counts, epoch, self.snapshot(), metrics)

    def _measured(self) -> dict[str, float]:
        """Engine utilization, and the number of ready groups; in lock-step that is 0."""
        assert self._measured_from is not None
        since, busy_before = self._measured_from
        now = time.perf_counter()
        busy = self._busy_seconds()
        self._measured_from = (now, busy)
        metrics = {"time/engine": busy - busy_before}
        if not self._lockstep:
            share = (busy - busy_before) / max(now - since, 1e-9)
            metrics |= {
                "rollout/buffered_groups": float(self._scheduler.num_finished),
                "rollout/in_flight_groups": float(self._scheduler.num_in_flight),
                "rollout/dropped_stale": float(self._counts.dropped[STALE]),
                "perf/engine_idle_fraction": max(0.0, 1.0 - share),
            }
        return metrics

    # --- state ------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """A snapshot of this moment."""
        finished = tuple(self._buffer[draw] for draw in sorted(self._buffer))
        return Snapshot(self._queue.snapshot(), finished, self._versions.known)

    def restore(self, state: Mapping[str, Any], groups: Sequence[BufferedGroup]) -> None:
        """Continue from a snapshot with its finished `groups`, of which lock-step keeps none."""
        self._queue.restore(state)
        step = self._queue.ledger.last_step
        # missing in a snapshot taken before the first draw
        ahead = state.get("ahead", {})
        self._versions.learn(ahead.get("versions", ()))
        self._buffer = restore_groups(self._queue, () if self._lockstep else groups)
        self._begin_behind(step)
        self._give_up_stale()

    def _begin_behind(self, step: int) -> None:
        oldest = {draw: buffered.oldest for draw, buffered in self._buffer.items()}
        self._scheduler = Scheduler.restore(self._rules, step, oldest)
        self._counts = DropCounts()
        self._failure = None

    async def halt(self) -> None:
        """Cancel what is in flight, and start nothing before the next publication."""
        self._halted = True
        tasks = set(self._tasks.values())
        for task in tasks:
            self._give_up(task)
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
        # from here on, a task that does not end is ignored
        self._tasks.clear()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
