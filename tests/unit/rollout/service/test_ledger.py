"""Every draw in one state, and the states add up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.ledger import Ledger


def test_the_life_of_a_draw():
    ledger = Ledger()
    ledger.draw([0, 1, 2])
    assert ledger.state(0) == "in flight"
    for draw in (0, 1):
        ledger.finish(draw)
    ledger.consume(0, step=7)
    ledger.drop(1, "zero_variance")
    ledger.requeue(2)
    assert [ledger.state(d) for d in range(3)] == ["consumed by step 7", "dropped by zero_variance", "requeued"]
    ledger.draw([2, 3])
    assert ledger.unsettled() == [2, 3]
    assert ledger.balance() == {"in flight": 2, "finished": 0, "requeued": 0, "consumed": 1, "dropped by zero_variance": 1}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda ledger: ledger.finish(9), "draw 9 is unknown: 3 draws"),
        (lambda ledger: ledger.consume(1, 1), "draw 1 is in flight, expected finished"),
        (lambda ledger: ledger.consume(0, 2), "draw 0 is consumed by step 1, expected finished"),
        (lambda ledger: ledger.drop(0, "f"), "draw 0 is consumed by step 1"),
        (lambda ledger: ledger.drop(1, "f"), "draw 1 is in flight, expected finished"),
        (lambda ledger: ledger.requeue(0), "draw 0 is consumed by step 1"),
        (lambda ledger: ledger.draw([0]), "draw 0 is consumed by step 1, expected requeued"),
        (lambda ledger: ledger.draw([5]), "draw 5 is unknown"),
        (lambda ledger: ledger.consume(2, 0), "steps count from 1"),
    ],
)
def test_nothing_is_used_twice_or_out_of_order(act, message):
    ledger = Ledger()
    ledger.draw([0, 1, 2])
    ledger.finish(0)
    ledger.consume(0, step=1)
    with pytest.raises(ValueError, match=message):
        act(ledger)


@given(st.lists(st.sampled_from(["consume", "f", "g", "requeue", "finish", "stay"]), max_size=60))
@settings(max_examples=60, deadline=None)
def test_snapshots_are_exact_and_balance(fates):
    ledger = Ledger()
    for draw, fate in enumerate(fates):
        ledger.draw([draw])
        if fate == "requeue":
            ledger.requeue(draw)
        elif fate != "stay":
            ledger.finish(draw)
        if fate == "consume":
            ledger.consume(draw, draw // 4 + 1)
        elif fate in "fg":
            ledger.drop(draw, fate)
    copy = Ledger()
    copy.restore(json.loads(json.dumps(ledger.snapshot())))
    assert [copy.state(d) for d in range(len(fates))] == [ledger.state(d) for d in range(len(fates))]
    assert copy.balance() == ledger.balance()
    assert sum(copy.balance().values()) == len(copy) == len(fates)


def test_a_snapshot_of_many_steps_is_small():
    ledger = Ledger()
    for draw in range(32_000):
        ledger.draw([draw])
        ledger.finish(draw)
        ledger.consume(draw, draw // 32 + 1)
    assert len(json.dumps(ledger.snapshot())) < 20_000


def test_it_knows_what_each_step_consumed():
    ledger = Ledger()
    assert (ledger.consumed(), ledger.last_step, ledger.requeued()) == ({}, 0, [])
    ledger.draw(range(6))
    for draw, step in ((4, 1), (0, 2), (2, 1), (5, 2)):
        ledger.finish(draw)
        ledger.consume(draw, step)
    ledger.requeue(1)
    assert (ledger.consumed(), ledger.last_step, ledger.requeued()) == ({1: [2, 4], 2: [0, 5]}, 2, [1])


def test_every_transition_is_told_once_it_is_made():
    told: list[tuple[str, int, object]] = []
    ledger = Ledger(lambda *one: told.append(one))
    ledger.draw([0, 1])
    ledger.finish(0)
    with pytest.raises(ValueError, match="draw 1 is in flight"):
        ledger.drop(1, "f")
    ledger.drop(0, "f")
    ledger.requeue(1, "stale")
    ledger.draw([1])
    assert told == [("drawn", 0, None), ("drawn", 1, None), ("finished", 0, None), ("dropped", 0, "f"),
                    ("requeued", 1, "stale"), ("drawn", 1, None)]  # fmt: skip


def test_a_corrupt_snapshot_is_refused():
    with pytest.raises(ValueError, match="unknown state -12"):
        Ledger().restore({"codes": [-12], "lengths": [3], "filters": ["only one"]})
