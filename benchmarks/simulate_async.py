"""Asynchronous training simulated, event by event, with the scheduler that runs use: `python benchmarks/simulate_async.py`.

Nothing is measured here but the order of things. Engines have slots, each makes tokens at a constant rate; a group of responses
is started when `rollout.schedule.Scheduler` has room and slots are free; lengths are log-normal, cut at a longest one; the
trainer takes a batch when the scheduler gives it one, trains for a time that goes with its tokens, then publishes, and all
slots stand still meanwhile. Engines die, what they worked on starts again elsewhere, and come back later. Filters drop groups.

`ratio` is a lower bound over the simulated time: max(slot-seconds of the groups trained on / slots, seconds of training).
Publications, failures, dropped groups and waiting for long responses are what is left of it to lose.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rollout.schedule import Rules, Scheduler

GOAL = 0.95


@dataclass(frozen=True)
class Setting:
    """One workload. Lengths in tokens, times in seconds."""

    groups: int = 2048                  # of a step
    samples: int = 16                   # of a group
    engines: int = 64
    slots: int = 64                     # of an engine
    tokens_per_s: float = 40.0          # of a slot
    median: float = 8000.0              # of the response lengths
    sigma: float = 0.9                  # of their logarithm
    longest: int = 65536
    train_share: float = 0.9            # training time over generation time, of a mean step
    publish_s: float = 10.0
    dropped: float = 0.0                # share of groups that a filter refuses
    oversample: float = 1.0
    days_between_failures: float = 2.0  # of one engine; 0: never
    down_s: float = 300.0
    steps: int = 40
    seed: int = 0


@dataclass
class Outcome:
    """From one hand-over to another, after the first few."""

    seconds: float = 0.0
    steps: int = 0
    generated_s: float = 0.0            # slot-seconds of what was trained on
    trained_s: float = 0.0
    busy_s: float = 0.0                 # slot-seconds in which a slot worked, on whatever
    staleness: list[int] = field(default_factory=list)
    stale: int = 0                      # groups that expired

    def ratio(self, slots: int) -> float:
        return max(self.generated_s / slots, self.trained_s) / self.seconds


@dataclass
class _Group:
    left: int                           # responses that are not finished
    started: int                        # policy step
    seconds: float = 0.0                # of all its responses


class Simulation:
    """Time stands still for the engines while weights are published: they have a clock of their own."""

    def __init__(self, setting: Setting, max_staleness: int) -> None:
        self.setting, self.random = setting, random.Random(setting.seed)
        self.scheduler = Scheduler(Rules(setting.groups, max_staleness, setting.oversample))
        self.now = self.paused_s = 0.0
        self.free = dict.fromkeys(range(setting.engines), setting.slots)        # of the engines that run
        self.waiting: deque[tuple[int, float]] = deque()        # responses (draw, seconds) without a slot
        # Of each engine, the responses by id: draw, seconds, since when.
        self.running: list[dict[int, tuple[int, float, float]]] = [{} for _ in range(setting.engines)]
        self.events: list[tuple[float, int, Callable[[int, int], None], int, int]] = []     # by the engines' clock
        self.groups: dict[int, _Group] = {}
        self.next_draw = self.next_id = 0
        self.training_ends: float | None = None         # by the trainer's clock
        self.outcome = Outcome()
        for engine in range(setting.engines):
            self._plan_failure(engine)

    def run(self) -> Outcome:
        setting, warm = self.setting, self.scheduler.rules.max_staleness + 3
        began = None
        self._start()
        while self.scheduler.steps_done < setting.steps + warm:
            if began is None and self.scheduler.steps_done >= warm:
                began, self.outcome = self.now, Outcome()
            if self.training_ends is not None and self.training_ends <= self.events[0][0] + self.paused_s:
                self.now = self.training_ends
                self._publish()
            else:
                at, _, happen, engine, response = heapq.heappop(self.events)
                self.now = at + self.paused_s
                happen(engine, response)
            self._start()
        assert began is not None
        self.outcome.seconds = self.now - began
        return self.outcome

    # --- what happens -----------------------------------------------------------------------------------------------

    def _finish(self, engine: int, response: int) -> None:
        found = self.running[engine].pop(response, None)
        if found is None:               # the engine died meanwhile
            return
        draw, seconds, _ = found
        self.free[engine] += 1
        self.outcome.busy_s += seconds
        group = self.groups.get(draw)
        if group is None:               # given up
            return
        group.left -= 1
        if group.left == 0:
            if self.random.random() < self.setting.dropped:
                self._forget(draw)
            else:
                self.scheduler.finished(draw, group.started)
            self._train()

    def _fail(self, engine: int, _: int) -> None:
        del self.free[engine]
        for draw, seconds, since in self.running[engine].values():
            self.outcome.busy_s += self._engine_time - since
            if draw in self.groups:
                self.waiting.appendleft((draw, seconds))
        self.running[engine].clear()
        self._event(self._engine_time + self.setting.down_s, self._back, engine)

    def _back(self, engine: int, _: int) -> None:
        self.free[engine] = self.setting.slots
        self._plan_failure(engine)

    def _publish(self) -> None:
        """Generation stands still from here until the new weights are in force."""
        self.paused_s += self.setting.publish_s
        self.now += self.setting.publish_s
        self.training_ends = None
        self.outcome.steps += 1
        self.scheduler.published(self.scheduler.steps_done)
        self._train()

    # --- what is decided --------------------------------------------------------------------------------------------

    def _train(self) -> None:
        batch = self.scheduler.batch() if self.training_ends is None else None
        if batch is None:
            return
        outcome, policy_step = self.outcome, self.scheduler.steps_done
        generated = 0.0
        for draw in batch:
            group = self.groups.pop(draw)
            generated += group.seconds
            outcome.staleness.append(policy_step - group.started)
        self.scheduler.hand_over(batch)
        for draw in self.scheduler.expired():
            self._forget(draw)
            outcome.stale += 1
        seconds = generated / (self.setting.engines * self.setting.slots) * self.setting.train_share
        outcome.generated_s += generated
        outcome.trained_s += seconds
        self.training_ends = self.now + seconds

    def _start(self) -> None:
        """Fill free slots: with what waits, then with new groups while the scheduler has room for them."""
        room = self.scheduler.room()
        for engine in sorted(self.free, key=self.free.__getitem__, reverse=True):
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
                self.running[engine][self.next_id] = (draw, seconds, self._engine_time)
                self._event(self._engine_time + seconds, self._finish, engine, self.next_id)

    def _new_group(self) -> None:
        draw, self.next_draw = self.next_draw, self.next_draw + 1
        self.scheduler.started([draw])
        times = [self._length() / self.setting.tokens_per_s for _ in range(self.setting.samples)]
        self.groups[draw] = _Group(len(times), self.scheduler.policy_step, sum(times))
        self.waiting.extend((draw, seconds) for seconds in times)

    def _forget(self, draw: int) -> None:
        self.scheduler.dropped(draw)
        del self.groups[draw]

    # --- numbers ----------------------------------------------------------------------------------------------------

    @property
    def _engine_time(self) -> float:
        return self.now - self.paused_s

    def _event(self, at: float, happen: Callable[[int, int], None], engine: int, response: int = 0) -> None:
        self.next_id += 1
        heapq.heappush(self.events, (at, self.next_id, happen, engine, response))

    def _length(self) -> float:
        length = self.random.lognormvariate(math.log(self.setting.median), self.setting.sigma)
        return min(self.setting.longest, max(1.0, length))

    def _plan_failure(self, engine: int) -> None:
        if self.setting.days_between_failures:
            pause = self.random.expovariate(1 / (self.setting.days_between_failures * 86400))
            self._event(self._engine_time + pause, self._fail, engine)



SETTINGS = {
    "4096 slots, 32768 responses a step": Setting(),
    "4096 slots, 8192 responses a step": Setting(groups=512),
    "the same, longest 16k": Setting(groups=512, longest=16384),
    "a filter drops 30 %, oversample 1.4": Setting(dropped=0.3, oversample=1.4),
    "training takes 1.5 of generation": Setting(train_share=1.5),
}


def row(name: str, setting: Setting, max_staleness: int) -> list[str]:
    found = Simulation(setting, max_staleness).run()
    slots = setting.engines * setting.slots
    return [
        name, str(max_staleness), f"{found.ratio(slots):.3f}", f"{3600 * found.steps / found.seconds:.2f}",
        f"{1 - found.trained_s / found.seconds:.3f}", f"{1 - found.busy_s / slots / found.seconds:.3f}",
        f"{statistics.fmean(found.staleness):.2f}", str(max(found.staleness)), str(found.stale),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="counted, after the first few")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--only", help="settings whose name contains this")
    arguments = parser.parse_args()
    columns = ["setting", "k", "of the bound", "steps/h", "trainer idle", "engines idle", "staleness, mean", "max", "expired"]
    print("| " + " | ".join(columns) + " |\n|---|" + "---:|" * (len(columns) - 1))
    for name, setting in SETTINGS.items():
        if arguments.only is None or arguments.only in name:
            for k in arguments.staleness:
                print("| " + " | ".join(row(name, replace(setting, steps=arguments.steps), k)) + " |", flush=True)


if __name__ == "__main__":
    main()
