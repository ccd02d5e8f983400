"""Simulates engines, slots and trainer as events in time, around the runs' own scheduler.

Engines have slots, each makes tokens at a constant rate; a group of responses is started when
`rollout.collection.staleness_scheduler.Scheduler` has room and slots are free. Lengths are log-
normal, cut at a longest one. The trainer takes a batch when the scheduler has one, trains for a
time that goes with its tokens, then publishes, and all slots stand still meanwhile. Engines die,
what they worked on starts again elsewhere, and come back later. Filters drop groups.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout.collection.staleness_scheduler import Rules, Scheduler


@dataclass(frozen=True)
class Setting:
    """One workload. Lengths in tokens, times in seconds."""

    groups: int = 2048  # of a step
    samples: int = 16  # of a group
    engines: int = 64
    slots_each: int = 64  # of an engine
    tokens_per_s: float = 40.0  # of a slot
    median: float = 8000.0  # of the response lengths
    sigma: float = 0.9  # of their logarithm
    longest: int = 65536
    train_share: float = 0.9  # training time over generation time, of a mean step
    publish_s: float = 10.0
    dropped: float = 0.0  # share of groups that a filter refuses
    oversample: float = 1.0
    days_between_failures: float = 2.0  # of one engine; 0: never
    down_s: float = 300.0
    steps: int = 40  # counted, after the first few
    seed: int = 0

    @property
    def slots(self) -> int:
        return self.engines * self.slots_each


@dataclass
class Outcome:
    """Measurements between hand-overs, without the first few."""

    setting: Setting
    seconds: float = 0.0
    generated_s: float = 0.0  # slot-seconds of what was trained on
    trained_s: float = 0.0
    busy_seconds: float = 0.0  # slot-seconds in which a slot worked, on whatever
    staleness: list[int] = field(default_factory=list)  # of each group, when it was trained on
    expired: int = 0  # groups

    @property
    def bound_s(self) -> float:
        """The least seconds that any schedule takes."""
        return max(self.generated_s / self.setting.slots, self.trained_s)

    @property
    def of_bound(self) -> float:
        return self.bound_s / self.seconds

    @property
    def longest_in_steps(self) -> float:
        """How many of the quickest steps the longest response takes."""
        return (
            self.setting.longest / self.setting.tokens_per_s / (self.bound_s / self.setting.steps)
        )


@dataclass
class _Group:
    left: int  # responses that are not finished
    started: int  # policy step
    seconds: float = 0.0  # of all its responses


class Simulation:
    """An engine, with a clock that stands still while weights are published."""

    def __init__(self, setting: Setting, max_staleness: int) -> None:
        self.setting = setting
        self.random = random.Random(setting.seed)
        self.scheduler = Scheduler(Rules(setting.groups, max_staleness, setting.oversample))
        self.now = self.paused_s = 0.0
        # of the engines that run
        self.free = dict.fromkeys(range(setting.engines), setting.slots_each)
        # responses (draw, seconds) without a slot
        self.waiting: deque[tuple[int, float]] = deque()
        # the same by id, an engine
        self.running: list[dict[int, tuple[int, float]]] = [{} for _ in range(setting.engines)]
        self.num_running = 0
        # by the engines' clock
        self.events: list[tuple[float, int, Callable[[int, int], None], int, int]] = []
        self.groups: dict[int, _Group] = {}  # in flight, or finished and not trained on
        self.next_draw = self.next_id = self.num_dropped = 0
        self.training_ends: float | None = None  # by the trainer's clock
        self.outcome = Outcome(setting)
        for engine in range(setting.engines):
            self._plan_failure(engine)

    def run(self) -> Outcome:
        warm = self.scheduler.rules.max_staleness + 3  # steps
        self._run_to(warm)
        began = self.now
        self.outcome = Outcome(self.setting)
        self._run_to(warm + self.setting.steps)
        self.outcome.seconds = self.now - began
        return self.outcome

    def _run_to(self, step: int) -> None:
        """Run until the step's batch is handed over."""
        while self.scheduler.steps_done < step:
            self._start()
            if self.training_ends is not None and self.training_ends <= self._next_event:
                self._go_to(self.training_ends)
                self._publish()
            else:
                at, _, happen, engine, response = heapq.heappop(self.events)
                self._go_to(at + self.paused_s)
                happen(engine, response)

    def _go_to(self, now: float) -> None:
        self.outcome.busy_seconds += self.num_running * (now - self.now)
        self.now = now

    # --- what happens -----------------------------------------------------------------------------

    def _finish(self, engine: int, response: int) -> None:
        found = self.running[engine].pop(response, None)
        if found is None:  # the engine died meanwhile
            return
        self.num_running -= 1
        self.free[engine] += 1
        draw, _ = found
        group = self.groups.get(draw)
        if group is None:  # given up
            return
        group.left -= 1
        if group.left == 0:
            if self.random.random() < self.setting.dropped:
                self._forget(draw)
            else:
                self.scheduler.finished(draw, group.started)
            self._train()

    def _fail(self, engine: int, _: int) -> None:
        """Restart all its requests on other engines, ahead of those that wait."""
        del self.free[engine]
        lost = self.running[engine]
        self.waiting.extendleft(reversed(lost.values()))
        self.num_running -= len(lost)
        lost.clear()
        self._event(self._engine_time + self.setting.down_s, self._back, engine)

    def _back(self, engine: int, _: int) -> None:
        self.free[engine] = self.setting.slots_each
        self._plan_failure(engine)

    def _publish(self) -> None:
        """Stop generation until the new weights are in force."""
        self.paused_s += self.setting.publish_s
        self.now += self.setting.publish_s
        self.training_ends = None
        self.scheduler.published(self.scheduler.steps_done)
        self._train()

    # --- what is decided --------------------------------------------------------------------------

    def _train(self) -> None:
        batch = self.scheduler.batch() if self.training_ends is None else None
        if batch is None:
            return
        outcome = self.outcome
        policy_step = self.scheduler.steps_done
        generated = 0.0
        for draw in batch:
            group = self.groups.pop(draw)
            generated += group.seconds
            outcome.staleness.append(policy_step - group.started)
        self.scheduler.hand_over(batch)
        for draw in self.scheduler.expired():
            self._forget(draw)
            outcome.expired += 1
        seconds = generated / self.setting.slots * self.setting.train_share
        outcome.generated_s += generated
        outcome.trained_s += seconds
        self.training_ends = self.now + seconds

    def _start(self) -> None:
        """Fill free slots with waiting requests, then with new groups if the scheduler has room."""
        room = self.scheduler.room()
        for engine in sorted(
            (e for e, slots in self.free.items() if slots), key=self.free.__getitem__, reverse=True
        ):
            while self.free[engine]:
                if not self.waiting:
                    if room <= 0:
                        return
                    self._new_group()
                    room -= 1
                draw, seconds = self.waiting.popleft()
                if draw not in self.groups:
                    continue
                self.free[engine] -= 1
                self.num_running += 1
                self.running[engine][self.next_id] = (draw, seconds)
                self._event(self._engine_time + seconds, self._finish, engine, self.next_id)

    def _new_group(self) -> None:
        draw = self.next_draw
        self.next_draw = self.next_draw + 1
        self.scheduler.started([draw])
        times = [self._length() / self.setting.tokens_per_s for _ in range(self.setting.samples)]
        self.groups[draw] = _Group(len(times), self.scheduler.policy_step, sum(times))
        self.waiting.extend((draw, seconds) for seconds in times)

    def _forget(self, draw: int) -> None:
        self.scheduler.dropped(draw)
        self.num_dropped += 1
        del self.groups[draw]

    # --- numbers ----------------------------------------------------------------------------------

    @property
    def _engine_time(self) -> float:
        return self.now - self.paused_s

    @property
    def _next_event(self) -> float:
        return self.events[0][0] + self.paused_s if self.events else math.inf

    def _event(
        self, at: float, happen: Callable[[int, int], None], engine: int, response: int = 0
    ) -> None:
        self.next_id += 1
        heapq.heappush(self.events, (at, self.next_id, happen, engine, response))

    def _length(self) -> float:
        length = self.random.lognormvariate(math.log(self.setting.median), self.setting.sigma)
        return min(self.setting.longest, max(1.0, length))

    def _plan_failure(self, engine: int) -> None:
        if self.setting.days_between_failures:
            pause = self.random.expovariate(1 / (self.setting.days_between_failures * 86400))
            self._event(self._engine_time + pause, self._fail, engine)
