"""Every draw is in one state, and the states add up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.accounting import ledger as ledger_module
from rollout.accounting.ledger import CHUNK, Ledger


def test_the_transitions_of_a_draw():
    ledger = Ledger()
    ledger.draw([0, 1, 2, 3])
    assert ledger.state(0) == "in flight"
    for draw in (0, 1):
        ledger.finish(draw)
    ledger.consume(0, step=7)
    ledger.drop(1, "zero_variance")
    ledger.requeue(2)
    ledger.fail(3, "timeout")
    assert [ledger.state(d) for d in range(4)] == [
        "consumed by step 7",
        "dropped by zero_variance",
        "requeued",
        "failed",
    ]
    ledger.draw([2, 4])
    assert ledger.unsettled() == [2, 4]
    assert ledger.balance() == {
        "in flight": 2,
        "finished": 0,
        "requeued": 0,
        "consumed": 1,
        "dropped by zero_variance": 1,
        "failed": 1,
    }


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda ledger: ledger.finish(9), "draw 9 is unknown: 4 draws"),
        (lambda ledger: ledger.finish(-1), "draw -1 is unknown: 4 draws"),
        (lambda ledger: ledger.finish(0), "draw 0 is consumed by step 1, expected in flight"),
        (lambda ledger: ledger.finish(3), "draw 3 is requeued, expected in flight"),
        (
            lambda ledger: [ledger.finish(1), ledger.finish(1)],
            "draw 1 is finished, expected in flight",
        ),
        (lambda ledger: ledger.requeue(3), "draw 3 is requeued, expected in flight or finished"),
        (lambda ledger: ledger.consume(1, 1), "draw 1 is in flight, expected finished"),
        (lambda ledger: ledger.consume(0, 2), "draw 0 is consumed by step 1, expected finished"),
        (lambda ledger: ledger.drop(0, "f"), "draw 0 is consumed by step 1"),
        (lambda ledger: ledger.drop(1, "f"), "draw 1 is in flight, expected finished"),
        (lambda ledger: ledger.requeue(0), "draw 0 is consumed by step 1"),
        (lambda ledger: ledger.fail(0, "error"), "draw 0 is consumed by step 1, expected in fl"),
        (
            lambda ledger: [ledger.fail(1, "error"), ledger.requeue(1)],
            "draw 1 is failed, expected in flight or finished",
        ),
        (lambda ledger: ledger.draw([0]), "draw 0 is consumed by step 1, expected requeued"),
        (lambda ledger: ledger.draw([5]), "draw 5 is unknown"),
        (lambda ledger: ledger.consume(2, 0), "steps count from 1"),
    ],
)
def test_nothing_is_used_twice_or_out_of_order(act, message):
    ledger = Ledger()
    ledger.draw([0, 1, 2, 3])
    ledger.finish(0)
    ledger.consume(0, step=1)
    ledger.requeue(3)
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
    assert [copy.state(d) for d in range(len(fates))] == [
        ledger.state(d) for d in range(len(fates))
    ]
    assert copy.balance() == ledger.balance()
    assert sum(copy.balance().values()) == len(copy) == len(fates)


def test_a_snapshot_with_a_state_that_cannot_be_is_refused():
    for code in (1 << 63, -(1 << 70)):
        with pytest.raises(ValueError, match="a draw is in no known state"):
            Ledger().restore({"codes": [code], "lengths": [1], "filters": []})


def one_after_another(count: int, step_of: Callable[[int], int]) -> Ledger:
    """Draw d was consumed by step `step_of(d)`."""
    ledger = Ledger()
    for draw in range(count):
        ledger.draw([draw])
        ledger.finish(draw)
        ledger.consume(draw, step_of(draw))
    return ledger


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_snapshot_of_many_steps_is_small(ahead):
    """A step has 32 draws; those made side by side end up in any of `ahead` + 1 steps."""
    late = random.Random(7)
    ledger = one_after_another(32_000, lambda draw: draw // 32 + 1 + late.randint(0, ahead))
    assert len(json.dumps(ledger.snapshot())) < 32_000
    assert Ledger.of(json.loads(json.dumps(ledger.snapshot()))).consumed() == ledger.consumed()


def test_a_snapshot_works_on_what_is_new_alone(monkeypatch):
    packed: list[int] = []
    monkeypatch.setattr(
        ledger_module,
        "packed",
        lambda codes, real=ledger_module.packed: [packed.append(len(codes)), real(codes)][1],
    )
    ledger = one_after_another(3 * CHUNK, lambda draw: 1)
    ledger.draw(range(3 * CHUNK, 5 * CHUNK))
    early = ledger.snapshot()
    assert early == ledger.snapshot()
    assert packed == [CHUNK] * 3
    for draw in reversed(range(3 * CHUNK, 5 * CHUNK)):
        ledger.finish(draw)
        ledger.drop(draw, "f")
        if draw == 4 * CHUNK:
            ledger.snapshot()
            assert packed == [CHUNK] * 3, "one that is settled waits for those before it"
    found = ledger.snapshot()
    assert packed == [CHUNK] * 5
    assert len(early["settled"]) == 3
    assert (found["codes"], found["lengths"]) == ([], [])
    copy = Ledger.of(found)
    assert (copy.same_as(ledger), copy.snapshot()) == (True, found)
    assert packed == [CHUNK] * 5, "what was restored is packed already"


@pytest.mark.parametrize("end", ["in flight", "finished", "requeued"])
def test_what_is_not_settled_is_never_packed(end):
    ledger = one_after_another(CHUNK - 1, lambda draw: 1)
    ledger.draw([CHUNK - 1])
    if end == "finished":
        ledger.finish(CHUNK - 1)
    elif end == "requeued":
        ledger.requeue(CHUNK - 1)
    assert (ledger.snapshot()["settled"], Ledger.of(ledger.snapshot()).state(CHUNK - 1)) == (
        [],
        end,
    )


def test_what_has_failed_is_settled():
    ledger = one_after_another(CHUNK - 1, lambda draw: 1)
    ledger.draw([CHUNK - 1])
    ledger.fail(CHUNK - 1, "timeout")
    found = ledger.snapshot()
    assert (len(found["settled"]), found["codes"]) == (1, [])
    assert Ledger.of(found).state(CHUNK - 1) == "failed"
    assert (ledger.unsettled(), ledger.requeued()) == ([], [])


def test_a_snapshot_is_of_its_moment():
    ledger = one_after_another(2, lambda draw: 1)
    ledger.draw(range(2, 5))
    for draw, name in ((2, "f"), (3, "g")):
        ledger.finish(draw)
        ledger.drop(draw, name)
    state = ledger.snapshot()
    before = json.dumps(state)
    copy = Ledger.of(state)
    for one in (ledger, copy):
        one.finish(4)
        one.drop(4, "h")
        assert [one.state(draw) for draw in (2, 3, 4)] == [
            "dropped by f",
            "dropped by g",
            "dropped by h",
        ]
    assert json.dumps(state) == before


def test_a_filter_has_one_name():
    ledger = Ledger()
    ledger.draw(range(4))
    for draw, name in enumerate("fgfg"):
        ledger.finish(draw)
        ledger.drop(draw, name)
    assert ledger.snapshot()["filters"] == ["f", "g"]


def test_ledgers_are_the_same_where_states_and_filters_are():
    def dropped(name: str) -> Ledger:
        ledger = Ledger()
        ledger.draw([0])
        ledger.finish(0)
        ledger.drop(0, name)
        return ledger

    assert dropped("f").same_as(dropped("f"))
    assert not dropped("f").same_as(dropped("g"))
    assert not dropped("f").same_as(Ledger())


def test_it_knows_what_each_step_consumed():
    ledger = Ledger()
    assert (ledger.consumed(), ledger.last_step, ledger.requeued()) == ({}, 0, [])
    ledger.draw(range(6))
    for draw, step in ((4, 1), (0, 2), (2, 1), (5, 2)):
        ledger.finish(draw)
        ledger.consume(draw, step)
    ledger.requeue(1)
    assert (ledger.consumed(), ledger.last_step, ledger.requeued()) == (
        {1: [2, 4], 2: [0, 5]},
        2,
        [1],
    )


def test_draws_of_a_step_are_in_order():
    steps = random.Random(3).choices(range(1, 4), k=2000)
    assert one_after_another(2000, lambda draw: steps[draw]).consumed() == {
        step: [draw for draw in range(2000) if steps[draw] == step] for step in (1, 2, 3)
    }


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
    assert told == [
        ("drawn", 0, None),
        ("drawn", 1, None),
        ("finished", 0, None),
        ("dropped", 0, "f"),
        ("requeued", 1, "stale"),
        ("drawn", 1, None),
    ]


@pytest.mark.parametrize("code", [-12, -11, -5, 0])
def test_a_corrupt_snapshot_is_refused(code):
    with pytest.raises(ValueError, match=f"3 draws have the unknown state {code}"):
        Ledger.of({"codes": [code], "lengths": [3], "filters": ["only one"]})


@pytest.mark.parametrize(
    "damage", [lambda word: word[:-8], lambda word: word[:-9], lambda word: "AAAA" + word[4:]]
)
def test_damaged_words_of_a_snapshot_are_refused(damage):
    state = one_after_another(CHUNK, lambda draw: draw + 1).snapshot()
    with pytest.raises(ValueError, match="draws that a snapshot keeps as one word are damaged"):
        Ledger.of({**state, "settled": [damage(state["settled"][0])]})
