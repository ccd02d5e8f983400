"""The simulation of benchmarks/ on a small scale: what it counts adds up, and generating ahead
pays.
"""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.simulation.async_world import Outcome, Setting, Simulation

# 64 responses a step on 32 slots, of a minute at most; an engine dies every quarter of an hour.
SMALL = Setting(
    groups=16,
    samples=4,
    engines=4,
    slots_each=8,
    tokens_per_s=100.0,
    median=600.0,
    longest=6000,
    publish_s=1.0,
    days_between_failures=0.01,
    down_s=30.0,
    steps=30,
)
WASTEFUL = dataclasses.replace(SMALL, dropped=0.3, oversample=1.4)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "setting", [SMALL, WASTEFUL], ids=["nothing is dropped", "a filter and too many"]
)
def test_every_group_is_accounted_for_and_none_is_too_old(
    setting: Setting, max_staleness: int
) -> None:
    world = Simulation(setting, max_staleness)
    found = world.run()
    scheduler = world.scheduler
    assert len(found.staleness) == setting.groups * setting.steps
    assert max(found.staleness) == max_staleness
    assert world.next_draw == setting.groups * scheduler.steps_done + world.num_dropped + len(
        world.groups
    )
    assert len(world.groups) == scheduler.num_in_flight + scheduler.num_finished
    assert world.num_running == sum(len(responses) for responses in world.running)
    assert (found.expired == 0) or setting.oversample > 1
    assert 0 < found.of_bound < 1
    assert found.busy_seconds <= setting.slots * found.seconds


def run(max_staleness: int) -> Outcome:
    return Simulation(SMALL, max_staleness).run()


def test_each_step_of_staleness_is_faster_than_lock_step_and_the_same_again() -> None:
    ratios = [run(k).of_bound for k in (0, 1, 2)]
    assert ratios == sorted(ratios)
    assert ratios[2] > 1.4 * ratios[0]
    assert run(2).of_bound == ratios[2]


def test_without_failures_publications_and_tails_nothing_is_lost() -> None:
    ideal = dataclasses.replace(SMALL, sigma=0.0, publish_s=0.0, days_between_failures=0.0)
    assert Simulation(ideal, 2).run().of_bound == pytest.approx(1.0)
    assert Simulation(ideal, 0).run().of_bound == pytest.approx(1 / (1 + ideal.train_share))
