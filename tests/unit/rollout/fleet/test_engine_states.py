"""The table of an engine's states: every state with every event."""

from __future__ import annotations

import itertools

import pytest

from rlcore.config.sections.rollout import RestartConfig
from rollout.fleet.engine_states import TRANSITIONS, Event, Health, State

LEGAL = {
    ("dead", "START"): "starting",
    ("starting", "UP"): "stale",
    ("stale", "DRAIN"): "draining",
    ("draining", "PUBLISHED"): "serving",
    ("draining", "MISSED"): "stale",
    ("serving", "DRAIN"): "draining",
    ("stale", "LEAVE"): "leaving",
    ("serving", "LEAVE"): "leaving",
    **{(state, "FAIL"): "dead" for state in ("starting", "stale", "draining", "serving")},
}


def in_state(state: State) -> Health:
    return Health(RestartConfig(), state=state)


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(State, Event)), ids=lambda value: value.name
)
def test_every_state_with_every_event(state: State, event: Event) -> None:
    health = in_state(state)
    after = LEGAL.get((str(state), event.name))
    assert health.accepts(event) == (after is not None)
    if after is None:
        with pytest.raises(
            ValueError, match=rf"an engine that is {state} does not accept {event.name}, only "
        ):
            health.on(event)
        assert health.state is state, "a refused event changes nothing"
    else:
        health.on(event)
        assert str(health.state) == after


def test_a_served_engine_had_a_whole_publication() -> None:
    """The event before serving is always PUBLISHED, which only a publication leads to."""
    assert [
        (state, event)
        for state, row in TRANSITIONS.items()
        for event, to in row.items()
        if to is State.SERVING
    ] == [(State.DRAINING, Event.PUBLISHED)]


def live(health: Health, *, serves: bool) -> None:
    for event in (Event.START, Event.UP, *((Event.DRAIN, Event.PUBLISHED) if serves else ())):
        health.on(event)
    health.on(Event.FAIL, "broken")


def test_the_pause_doubles_until_it_serves_again() -> None:
    health = Health(RestartConfig(limit=100, backoff_s=0.5, max_backoff_s=3.0))
    live(health, serves=True)
    assert health.why == "broken"
    pauses = [health.pause_s]
    for _ in range(4):
        live(health, serves=False)
        pauses.append(health.pause_s)
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    live(health, serves=True)
    assert health.pause_s == 0.5
    health.failed_starts = 10_000
    assert health.pause_s == 3.0


def test_restarts_are_counted_and_end() -> None:
    health = Health(RestartConfig(limit=2))
    assert (health.restarts, health.can_come_back) == (0, True), "not started yet"
    live(health, serves=True)
    for restarts in (1, 2):
        assert health.can_come_back
        live(health, serves=True)
        assert health.restarts == restarts
    assert not health.can_come_back, "a life that served does not give restarts back"


def test_no_restart_at_all() -> None:
    health = Health(RestartConfig(limit=0))
    health.on(Event.START)
    assert health.can_come_back, "it is not dead"
    health.on(Event.FAIL, "gone")
    assert not health.can_come_back


def test_a_fault_a_day_ends_no_engine() -> None:
    """Only restarts within the window count: a run may last for months."""
    health = Health(RestartConfig(limit=3, window_s=100.0))

    def fault(now: float) -> bool:
        for event in (Event.START, Event.UP, Event.FAIL):
            health.on(event, now=now)
        return health.can_come_back

    assert all(fault(now) for now in range(0, 1000, 60)), "never more than two within 100 s"
    assert health.restarts == 16
    assert health.restarts_left == 1
    assert not fault(961.0), "three within 100 s"


def test_an_engine_that_leaves_is_not_waited_for() -> None:
    for state in State:
        assert in_state(state).can_come_back == (state is not State.LEAVING), state
    dead = Health(RestartConfig(limit=0))
    assert not dead.can_come_back
