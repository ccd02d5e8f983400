"""Every order in which small runs can go, and many of larger ones: the bound holds, nothing is
lost, nothing waits for ever.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.collection.staleness_scheduler import Rules, Scheduler


class World:
    """Engines and trainer around one scheduler. What is asserted here holds after every move.

    A trainer hands a batch over, then publishes the weights that it made, then hands the next one
    over.
    """

    def __init__(self, rules: Rules, drops: int = 0) -> None:
        self.rules = rules
        self.scheduler = Scheduler(rules)
        self.next_draw = 0
        self.drops_left = drops
        self.in_flight: dict[int, int] = {}  # draw -> policy step of its first token
        self.done: dict[int, int] = {}
        self.trained: list[int] = []
        self.given_up: list[int] = []
        self.training = False
        self.fill()

    def fill(self) -> None:
        count = self.scheduler.room()
        draws = range(self.next_draw, self.next_draw + count)
        self.next_draw += count
        self.scheduler.started(draws)
        self.in_flight.update(dict.fromkeys(draws, self.scheduler.policy_step))
        assert self.scheduler.room() == 0

    def moves(self) -> Iterator[tuple[str, int]]:
        for draw in self.in_flight:
            yield "finish", draw
            if self.drops_left:
                yield "drop", draw
        if self.training:
            yield "publish", 0
        elif self.scheduler.batch() is not None:
            yield "train", 0

    def make(self, move: str, draw: int) -> None:
        scheduler = self.scheduler
        if move == "finish":
            self.done[draw] = self.in_flight.pop(draw)
            scheduler.finished(draw, self.done[draw])
        elif move == "drop":
            del self.in_flight[draw]
            scheduler.dropped(draw)
            self.given_up.append(draw)
            self.drops_left -= 1
        elif move == "publish":
            scheduler.published(scheduler.steps_done)
            self.training = False
        else:
            self.train()
        self.fill()
        self.check()

    def train(self) -> None:
        scheduler = self.scheduler
        batch = self.scheduler.batch()
        assert batch is not None
        ages = [self.done[draw] for draw in batch]
        assert batch == [draw for _, draw in sorted(zip(ages, batch))]
        assert scheduler.steps_done - min(ages) <= self.rules.max_staleness
        assert scheduler.must_wait_for() == []
        scheduler.hand_over(batch)
        self.trained += batch
        for draw in batch:
            del self.done[draw]
        late = scheduler.expired()
        for draw in late:
            scheduler.dropped(draw)
            self.in_flight.pop(draw, None)
            self.done.pop(draw, None)
        self.given_up += late
        assert self.rules.oversample > 1 or not late
        self.training = True

    def check(self) -> None:
        scheduler = self.scheduler
        assert (scheduler.num_in_flight, scheduler.num_finished) == (
            len(self.in_flight),
            len(self.done),
        )
        everywhere = [*self.in_flight, *self.done, *self.trained, *self.given_up]
        assert sorted(everywhere) == list(range(self.next_draw))
        if not self.training and scheduler.batch() is None:
            waited = scheduler.must_wait_for()
            assert waited
            assert set(waited) <= set(self.in_flight)
        bound = (self.rules.max_staleness + 1) * self.rules.groups_per_step
        assert len(self.done) + len(self.in_flight) <= math.ceil(bound * self.rules.oversample)

    def key(self) -> tuple[object, ...]:
        """What its future depends on: ages relative to now, draws by their order."""
        now = self.scheduler.steps_done
        order = {d: i for i, d in enumerate(sorted([*self.in_flight, *self.done]))}

        def relative(draws: dict[int, int]) -> tuple[tuple[int, int], ...]:
            return tuple(sorted((order[draw], now - t) for draw, t in draws.items()))

        return (
            relative(self.in_flight),
            relative(self.done),
            self.training,
            now - self.scheduler.policy_step,
            self.drops_left,
        )


SMALL = [
    (Rules(b, k, oversample), drops)
    for b, k, oversample in [
        (1, 0, 1.0),
        (2, 0, 1.0),
        (3, 0, 1.0),
        (1, 1, 1.0),
        (2, 1, 1.0),
        (1, 2, 1.0),
        (1, 3, 1.0),
        (2, 2, 1.0),
        (1, 1, 2.0),
        (2, 1, 1.5),
        (1, 2, 1.5),
    ]
    for drops in (0, 2)
]


@pytest.mark.parametrize(("rules", "drops"), SMALL, ids=str)
def test_every_order_of_a_small_run(rules: Rules, drops: int) -> None:
    first = World(rules, drops)
    seen = {first.key()}
    waiting = deque([first])
    while waiting:
        world = waiting.popleft()
        moves = list(world.moves())
        assert moves  # something can always be done
        for move in moves:
            after = copy.deepcopy(world)
            after.make(*move)
            if after.key() not in seen:
                seen.add(after.key())
                waiting.append(after)
    assert len(seen) > 1


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(0, 4),
    st.sampled_from([1.0, 1.25, 2.0]),
    st.integers(0, 40),
    st.integers(0, 2**32 - 1),
)
def test_any_order_of_a_larger_run(
    groups: int, staleness: int, oversample: float, drops: int, seed: int
) -> None:
    world = World(Rules(groups, staleness, oversample), drops)
    chance = random.Random(seed)
    # finish only when nothing else can be done
    slow = {draw for draw in range(400) if chance.random() < 0.1}
    for _ in range(150):
        moves = list(world.moves())
        quick = [move for move in moves if move[1] not in slow or move[0] not in ("finish", "drop")]
        world.make(*chance.choice(quick or moves))
    assert len(world.trained) == groups * world.scheduler.steps_done > 0


def test_a_run_goes_on_with_what_is_finished_and_its_age() -> None:
    finished = {4: 0}
    again = Scheduler.restore(Rules(2, 2), 1, finished)
    assert (again.num_in_flight, again.num_finished, again.steps_done, again.policy_step) == (
        0,
        1,
        1,
        1,
    )
    assert again.room() == 5  # of the places of three steps
    again.started([1, 2])
    again.finished(1, 1)
    assert again.batch() == [4, 1]
    stricter = Scheduler.restore(Rules(2, 0), 1, finished)
    assert stricter.expired() == [4]


def test_what_has_expired_is_in_no_batch_even_before_it_is_dropped() -> None:
    finished = {12: 3, 7: 0, 5: 0, 9: 2, 6: 0, 8: 1}
    scheduler = Scheduler.restore(Rules(2, 1), 3, finished)
    assert scheduler.expired() == [5, 6, 7, 8]
    assert scheduler.batch() == [9, 12]
    assert Scheduler.restore(Rules(3, 1), 3, finished).batch() is None


def test_over_sampling_starts_more_for_what_filters_will_drop() -> None:
    scheduler = Scheduler(Rules(4, 1, 1.5))
    assert scheduler.room() == 12
    scheduler.started(range(12))
    assert scheduler.room() == 0
    for draw in range(6):
        scheduler.dropped(draw)
    assert scheduler.room() == 6
    for draw in range(6, 10):
        scheduler.finished(draw, 0)
    assert scheduler.room() == (8 - 4) * 1.5 - 2


def test_of_too_many_groups_the_places_go_by_draw_and_not_by_who_is_quick() -> None:
    scheduler = Scheduler(Rules(2, 0, 2.0))
    scheduler.started(range(4))
    for draw, waited in ((3, [0, 1]), (0, [1]), (2, [1])):
        scheduler.finished(draw, 0)
        assert (scheduler.batch(), scheduler.must_wait_for()) == (None, waited)
    scheduler.dropped(1)  # by a filter: the next in order has its place
    assert (scheduler.batch(), scheduler.must_wait_for()) == ([0, 2], [])
    scheduler.hand_over([0, 2])
    assert scheduler.expired() == [3]


def test_what_older_groups_leave_is_what_places_there_are() -> None:
    scheduler = Scheduler(Rules(2, 1, 2.0))
    scheduler.started(range(8))
    for draw in range(3):
        scheduler.finished(draw, 0)
    scheduler.hand_over([0, 1])
    for draw in range(3, 8):
        scheduler.dropped(draw)
    scheduler.published(1)
    scheduler.started(range(8, 13))
    for draw in (11, 12):
        scheduler.finished(draw, 1)
    # Two steps may take draw 2 and the five after it: four places, of which 2, 8, 9 and 10 have
    # one.
    assert (scheduler.batch(), scheduler.must_wait_for()) == (None, [8, 9, 10])
    scheduler.finished(9, 1)
    assert scheduler.batch() == [2, 9]
