"""Decides when groups are started and which of them the next step trains on: no clock, no I/O.

Terms. A group is the samples of one draw of a prompt. Policy step p is the weights after p updates.
Step s (from 1) trains the weights of policy step s - 1. A group of age class t has its oldest token
from policy step t (in flight: it was started under t, and can only turn out younger). With
`max_staleness` k, steps up to t + k + 1 may train on it, and no later step.

Two rules keep that bound without dropping anything:

- A group is started only if the steps within its age limit have slots for it and for everything
  started before it.
- A step takes the oldest finished groups, but waits if taking them would leave more groups behind,
  counting those in flight, than the following steps can take in time: earliest deadline first, as
  in scheduling (Liu and Layland, 1973). So the trainer waits for a long response instead of leaving
  it behind, and response length causes no bias.

With `oversample` above 1 more groups are started than there are slots, since filters will drop
some. Surplus groups are kept for later steps. Within a class, slots go by draw, never by which
group finished first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rules:
    """The numbers that bound a schedule. Raises ValueError if they are out of range."""

    groups_per_step: int
    max_staleness: int
    oversample: float = 1.0

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0 or not self.oversample >= 1:
            raise ValueError(
                f"expected groups_per_step >= 1, max_staleness >= 0 and oversample >= 1, got {self}"
            )


@dataclass
class _AgeClass:
    """The groups of one oldest policy step that were not trained on yet, as sorted draws."""

    in_flight: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.finished)

    def first(self, count: int) -> tuple[list[int], list[int]]:
        """The draws in flight and the finished ones among the first `count` draws."""
        if count >= len(self):
            return self.in_flight, self.finished
        # number of finished draws among them
        low = 0
        high = len(self.finished)
        while low < high:
            middle = (low + high + 1) // 2
            if bisect_left(self.in_flight, self.finished[middle - 1]) + middle <= count:
                low = middle
            else:
                high = middle - 1
        return self.in_flight[: count - low], self.finished[:low]


class Scheduler:
    """The groups of a run that are in flight, or finished and not trained on.

    Args:
        policy_step: policy step of the engines' current weights.
        steps_done: number of training steps whose groups were handed over.
    """

    def __init__(self, rules: Rules, *, policy_step: int = 0, steps_done: int = 0) -> None:
        self.rules = rules
        self.policy_step = policy_step
        self.steps_done = steps_done
        self._classes: dict[int, _AgeClass] = {}
        # draw -> age class
        self._class_of: dict[int, int] = {}

    # --- starts -----------------------------------------------------------------------------------

    def room(self) -> int:
        """Number of groups that may be started now."""
        places = (
            self.policy_step + self.rules.max_staleness + 1 - self.steps_done
        ) * self.rules.groups_per_step
        free = places - self.num_finished
        return max(0, math.ceil(free * self.rules.oversample) - self.num_in_flight)

    def started(self, draws: Iterable[int]) -> None:
        """Record that `draws` are in flight, under the current policy step."""
        for draw in draws:
            if draw in self._class_of:
                raise ValueError(f"draw {draw} was started already")
            self._class_of[draw] = self.policy_step
            insort(self._age(self.policy_step).in_flight, draw)

    def finished(self, draw: int, oldest: int) -> None:
        """Record a whole, accepted group. `oldest`: policy step of its oldest token."""
        age = self._classes.get(self._class_of.get(draw, -1))
        if age is None or not _has(age.in_flight, draw):
            raise ValueError(f"draw {draw} is not in flight")
        self._leave(draw, age.in_flight)
        self._class_of[draw] = oldest
        insort(self._age(oldest).finished, draw)

    def dropped(self, draw: int) -> None:
        """Free the slot of a group, in flight or finished, that no step will train on."""
        if draw not in self._class_of:
            raise ValueError(f"draw {draw} is neither in flight nor finished")
        age = self._classes[self._class_of[draw]]
        self._leave(draw, age.in_flight if _has(age.in_flight, draw) else age.finished)

    # --- the next step ----------------------------------------------------------------------------

    def batch(self) -> list[int] | None:
        """The draws that the next step trains on, the oldest first; None while it has to wait."""
        # the usual case
        if self.num_finished < self.rules.groups_per_step:
            return None
        chosen, _ = self._next()
        return chosen if len(chosen) == self.rules.groups_per_step else None

    def must_wait_for(self) -> list[int]:
        """The draws in flight that block the next batch, from the most urgent classes.

        Empty if a batch is ready.
        """
        return self._next()[1]

    def hand_over(self, draws: Sequence[int]) -> None:
        """Give the next step the draws that `batch` returned."""
        if len(draws) != self.rules.groups_per_step:
            raise ValueError(f"got {len(draws)} groups, a step takes {self.rules.groups_per_step}")
        for draw in draws:
            t = self._class_of.get(draw)
            if t is None or not _has(self._classes[t].finished, draw):
                raise ValueError(f"draw {draw} is not finished")
            if t < self._oldest_allowed:
                step = self.steps_done + 1
                oldest = self._oldest_allowed
                raise ValueError(
                    f"draw {draw} is of policy step {t}, too old for step {step}: it takes"
                    f" {oldest} on"
                )
            self._leave(draw, self._classes[t].finished)
        self.steps_done += 1

    def published(self, policy_step: int) -> None:
        """Record that engines have the weights of `policy_step`."""
        if policy_step < self.policy_step:
            raise ValueError(
                f"policy step {policy_step} after {self.policy_step}: they never decrease"
            )
        self.policy_step = policy_step

    def expired(self) -> list[int]:
        """The draws, in flight or finished, that no future step may train on.

        With `oversample` 1 the list is empty.
        """
        late = [age for t, age in sorted(self._classes.items()) if t < self._oldest_allowed]
        return [draw for age in late for draw in sorted((*age.in_flight, *age.finished))]

    # --- counts and restoring ---------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Number of groups in flight."""
        return sum(len(age.in_flight) for age in self._classes.values())

    @property
    def num_finished(self) -> int:
        """Number of groups that are finished and not handed over."""
        return sum(len(age.finished) for age in self._classes.values())

    @classmethod
    def restore(cls, rules: Rules, step: int, finished: Mapping[int, int]) -> Scheduler:
        """The scheduler of a run that continues after `step`, with nothing in flight.

        The rules may have changed since then: see `expired`.

        Args:
            finished: the policy step of the oldest token of each finished group, by draw.
        """
        scheduler = cls(rules, policy_step=step, steps_done=step)
        for draw, oldest in finished.items():
            scheduler._class_of[draw] = oldest
            insort(scheduler._age(oldest).finished, draw)
        return scheduler

    # --- helpers ----------------------------------------------------------------------------------

    def _next(self) -> tuple[list[int], list[int]]:
        """The finished draws chosen for the next batch, and the draws in flight that block it."""
        wanted = self.rules.groups_per_step
        chosen: list[int] = []
        # draws in flight of this class and older ones
        in_flight: list[int] = []
        for t, going, finished in self._placed():
            chosen += finished[: wanted - len(chosen)]
            in_flight += going
            # no class has more groups than slots: the following steps can take the rest
            if len(chosen) == wanted:
                return chosen, []
            # later steps lack slots for the rest: no younger group may go first
            if len(in_flight) > self._places(t) - wanted:
                break
        return chosen, in_flight

    @property
    def _oldest_allowed(self) -> int:
        """The oldest age class that the next step may take."""
        return self.steps_done - self.rules.max_staleness

    def _places(self, t: int) -> int:
        """Number of slots in all steps from the next on that may take groups of age class `t`."""
        return (t - self._oldest_allowed + 1) * self.rules.groups_per_step

    def _placed(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """(age class, draws in flight, draws finished) of groups with a slot, oldest first."""
        placed = 0
        for t in sorted(t for t in self._classes if t >= self._oldest_allowed):
            age = self._classes[t]
            count = min(len(age), self._places(t) - placed)
            placed += count
            yield t, *age.first(count)

    def _age(self, t: int) -> _AgeClass:
        return self._classes.setdefault(t, _AgeClass())

    def _leave(self, draw: int, draws: list[int]) -> None:
        del draws[bisect_left(draws, draw)]
        t = self._class_of.pop(draw)
        if not len(self._classes[t]):
            del self._classes[t]


def _has(draws: Sequence[int], draw: int) -> bool:
    at = bisect_right(draws, draw)
    return at > 0 and draws[at - 1] == draw
