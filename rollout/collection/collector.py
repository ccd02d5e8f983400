"""Groups made while the trainer trains, up to `rollout.max_staleness` policy steps ahead of it.

`rollout/collection/scheduler.py` decides; this page does what it says. Everything happens on the
rollout loop, and three things make a move: a publication, a hand-over, and an engine that has room.
Each group that is finished waits in the buffer for its step. What goes wrong meanwhile is raised
where the trainer asks next.
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
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.buffer import STALE, BufferedGroup, GroupBuffer, Snapshot, settle
from rollout.collection.filters import FilterChain
from rollout.collection.group_runner import Group, GroupRunner
from rollout.collection.lockstep_collector import DRAWS_PER_GROUP, DropCounts, StepGroups
from rollout.collection.published_versions import PublishedVersions
from rollout.collection.scheduler import Rules, Scheduler

logger = logging.getLogger(__name__)

CLOSE_S = 5.0


class Collector:
    """For `rollout.max_staleness` above 0. Generation begins with the first publication.

    Args:
        steps: of the run; nothing is made for more.
        busy_s: seconds in which any engine had work, so far.
    """

    def __init__(
        self,
        config: Config,
        draws: PromptQueue,
        runner: GroupRunner,
        filters: FilterChain,
        versions: PublishedVersions,
        *,
        steps: int,
        busy_s: Callable[[], float],
    ) -> None:
        rollout = config.rollout
        self._config = rollout
        self._draws = draws
        self._runner = runner
        self._filters = filters
        self._versions = versions
        self._steps = steps
        self._busy_s = busy_s
        self._rules = Rules(rollout.prompts_per_step, rollout.max_staleness, rollout.oversample)
        self._scheduler = Scheduler(self._rules)
        self._buffer = GroupBuffer()
        # what makes each draw in flight; a wave makes several
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # that were cancelled and have not ended, and why
        self._given_up: dict[asyncio.Task[None], str] = {}
        self._tally = DropCounts()  # since the last hand-over
        self._failure: BaseException | None = None
        self._news = asyncio.Event()  # renewed each time
        self._woken = False
        self._halted = True
        # when the last hand-over was; how busy engines had been then
        self._handed_over: tuple[float, float] | None = None

    # --- what the trainer asks --------------------------------------------------------------------

    async def collect(self, step: int) -> StepGroups:
        """The groups that `step` trains on, once the scheduler gives them.

        Raises what went wrong since the last call, in an engine, a workflow, a reward or a filter;
        then it goes on.
        """
        if step != self._scheduler.steps_done + 1:
            raise ValueError(
                f"step {step} was asked for, step {self._scheduler.steps_done + 1} is the next"
            )
        while True:
            if self._failure is not None:
                failure = self._failure
                self._failure = None
                self._wake()
                raise failure
            if (chosen := self._scheduler.batch()) is not None:
                return self._hand_over(sorted(chosen))
            await self._news.wait()

    def published(self, step: int) -> None:
        """Weights of policy step `step` are in force; generation begins, or goes on, with them."""
        self._halted = False
        self._handed_over = self._handed_over or (time.perf_counter(), self._busy_s())
        self._scheduler.published(step)
        self._wake()

    def room_changed(self) -> None:
        """An engine may have room that it had not before."""
        self._wake()

    def stuck(self) -> str:
        """Who is waited for."""
        scheduler = self._scheduler
        if self._halted:
            return "weights to be published"
        if waits_for := scheduler.must_wait_for():
            return self._runner.stuck(set(waits_for))
        there = (
            f"{scheduler.num_finished} groups are finished and {scheduler.num_in_flight} in flight"
        )
        return f"{there}: {self._runner.dispatcher.waiting_for() or 'no engine has room'}"

    def give_up(self) -> None:
        """The trainer got an error instead of its groups; these stay for its next call."""

    # --- when groups are started ------------------------------------------------------------------

    def _wake(self) -> None:
        """See what may be started, soon: several things may happen at once."""
        if not self._woken and not self._halted:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        """As many as are wanted, and as engines would begin at once: one that waits in a queue ages
        for nothing.
        """
        self._woken = False
        if self._halted or self._failure is not None:
            return
        with self._heard():
            count = min(self._wanted(), self._runner.room(self._config.samples_per_prompt))
            if count > 0:
                self._begin(self._draws.take(count))

    def _begin(self, draws: Sequence[int]) -> None:
        self._tally.draws += len(draws)
        self._scheduler.started(draws)
        for wave in [draws] if self._runner.batched else [[draw] for draw in draws]:
            task = asyncio.get_running_loop().create_task(self._make(wave))
            self._tasks |= dict.fromkeys(wave, task)
            task.add_done_callback(partial(self._ended, wave))

    def _wanted(self) -> int:
        """Groups that there is room for, and that a step of the run is left for."""
        scheduler = self._scheduler
        left = (
            self._steps - scheduler.steps_done
        ) * self._rules.groups_per_step - scheduler.num_finished
        return min(
            scheduler.room(), math.ceil(left * self._rules.oversample) - scheduler.num_in_flight
        )

    # --- what becomes of them ---------------------------------------------------------------------

    async def _make(self, draws: Sequence[int]) -> None:
        """From prompts to finished groups."""
        for group in await self._runner.run(draws):
            # else a halt went on without it
            if self._tasks.get(group.draw) is asyncio.current_task():
                self._settle(group)

    def _ended(self, draws: Sequence[int], task: asyncio.Task[None]) -> None:
        """Whatever went wrong in it, the trainer learns of it at its next call; but not of how what
        was given up has ended.

        PromptQueue are given back here, since one that is cancelled before its first step does
        nothing itself.
        """
        with self._heard():
            for draw in draws:
                # its samples will not come, or are of no use
                if self._tasks.get(draw) is task:
                    self._draw_again(draw)
        given_up = self._given_up.pop(task, None) is not None
        if not task.cancelled() and (error := task.exception()) is not None:
            if given_up:
                logger.warning(
                    "draws %s were given up, and what made them then failed: %s", draws, error
                )
            else:
                self._failed(error)
        self._tell()
        self._wake()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """For what the loop calls: nobody but the trainer would hear of an error there."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - recovery: of the journal, say; raised at the trainer's next call
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._tell()

    def _settle(self, group: Group) -> None:
        """A group is there: kept, or dropped by a filter, or drawn again."""
        draw = group.draw
        scheduler = self._scheduler
        refused_by = None if group.aborted else self._filters.refusal(group.samples)
        if group.aborted:
            self._tally.requeued += 1
            self._draw_again(draw)
        else:
            self._draws.ledger.finish(draw)
            del self._tasks[draw]
        if refused_by is not None:
            self._draws.ledger.drop(draw, refused_by)
            scheduler.dropped(draw)
            self._tally.dropped[refused_by] += 1
        elif not group.aborted:
            kept = self._aged(group, scheduler.policy_step)
            self._buffer.put(kept)
            scheduler.finished(draw, kept.oldest)
            self._give_up_stale()
        self._check_yield()

    def _aged(self, group: Group, now: int) -> BufferedGroup:
        """With the policy steps of its tokens. A version that is not known yet is of the
        publication that is about to end: it counts as old where age matters, and as new where a
        trainer goes back.
        """
        samples = (*group.samples, *group.greedy)
        made = [
            self._versions.of(span.version)
            for one in samples
            for span in one.versions
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
        """What no step may train on any more is drawn again; what is in flight, when it has ended."""
        for draw in self._scheduler.expired():
            if draw in self._buffer:
                self._buffer.take(draw)
                self._scheduler.dropped(draw)
                self._draws.give_back(draw, STALE)
                self._tally.dropped[STALE] += 1
            # those of a wave end together
            elif not self._runner.batched and self._tasks[draw] not in self._given_up:
                self._give_up(self._tasks[draw], STALE)

    def _give_up(self, task: asyncio.Task[None], reason: str = "") -> None:
        if task.cancel():  # else it has ended by itself
            self._given_up.setdefault(task, reason)

    def _draw_again(self, draw: int) -> None:
        """It is not in flight any more, and no samples are kept of it."""
        reason = self._given_up.get(self._tasks.pop(draw), "")
        if reason:
            self._tally.dropped[reason] += 1
        self._scheduler.dropped(draw)
        self._draws.give_back(draw, reason)

    def _check_yield(self) -> None:
        """Raises EmptyBatch where the filters, or their age, leave too few for a step."""
        tally = self._tally
        wanted = self._rules.groups_per_step
        if (
            len(self._buffer) < wanted
            and tally.dropped.total() + tally.requeued >= DRAWS_PER_GROUP * wanted
        ):
            self._tally = DropCounts()
            raise tally.too_little(self._scheduler.steps_done + 1, len(self._buffer), wanted)

    # --- a step -----------------------------------------------------------------------------------

    def _hand_over(self, chosen: Sequence[int]) -> StepGroups:
        groups = [self._buffer.take(draw).group for draw in chosen]
        self._scheduler.hand_over(chosen)
        self._give_up_stale()
        self._draws.hand_over(chosen, self._scheduler.steps_done)
        finished = self._scheduler.num_finished
        in_flight = self._scheduler.num_in_flight
        metrics = {
            "rollout/buffered_groups": float(finished),
            "rollout/in_flight_groups": float(in_flight),
            "rollout/dropped_stale": float(self._tally.dropped[STALE]),
            **self._measured(),
        }
        tally = self._tally
        self._tally = DropCounts()
        self._wake()
        stream = self._draws.stream
        return StepGroups(
            groups, tally, stream.epoch - (finished + in_flight) / stream.size, self.cut(), metrics
        )

    def _measured(self) -> dict[str, float]:
        """How busy engines were since the last hand-over."""
        assert self._handed_over is not None
        since, busy_before = self._handed_over
        now, busy = self._handed_over = time.perf_counter(), self._busy_s()
        share = (busy - busy_before) / max(now - since, 1e-9)
        return {
            "time/engine": busy - busy_before,
            "perf/engine_idle_fraction": max(0.0, 1.0 - share),
        }

    # --- state ------------------------------------------------------------------------------------

    def cut(self) -> Snapshot:
        """Of this moment."""
        return Snapshot(self._draws.snapshot(), tuple(self._buffer), self._versions.known)

    def restore(self, state: Mapping[str, Any], kept: Sequence[BufferedGroup]) -> None:
        """Continue from a cut, whose groups are `kept`, once `halt` has returned.

        What was finished since stays, unless a later policy step than that of the cut made a token
            of it: the trainer has
        forgotten those weights.
        """
        self._draws.restore(state)
        step = self._draws.ledger.last_step
        ahead = state.get("ahead", {})  # there is none before the first draw
        self._versions.learn(ahead.get("versions", ()))
        settle(self._draws, self._buffer, kept, step=step)
        self._scheduler = Scheduler.restore(self._rules, step, self._buffer.ages())
        self._tally = DropCounts()
        self._failure = None
        self._give_up_stale()

    # --- the end ----------------------------------------------------------------------------------

    async def halt(self) -> None:
        """Nothing is in flight when this returns, and nothing begins before the next publication."""
        self._halted = True
        tasks = set(self._tasks.values())
        for task in tasks:
            self._give_up(task)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        self._tasks.clear()  # one that does not end has no say any more

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
