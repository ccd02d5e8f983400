"""`max_staleness` above 0: groups are made ahead, and never too old when they are trained on."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from ahead_kit import (
    Continuous,
    ages,
    draws_of,
    hold,
    publish,
    quiet,
    release,
    rollout,
    settled,
    train,
    wait_until,
)
from fake_engine import FakeEngine, random_reply

from rlcore.errors import DeadlineExceeded, EmptyBatch, RunFailed
from rollout.accounting.journal_reader import read_journal


@pytest.fixture
def engines() -> list[Continuous]:
    return [Continuous(random_reply(31), name=name) for name in "ab"]


# --- what is made ---------------------------------------------------------------------------------


def test_groups_are_made_before_anybody_asks(make_service, engines):
    service = make_service(engines=engines, rollout=rollout(2))
    assert service.ledger.balance()["finished"] == 0, "nothing is published yet"
    publish(service, engines, 0)
    wait_until(lambda: service.ledger.balance()["finished"] == 12)
    first = service.next_step(1)
    assert draws_of(first) == [0, 1, 2, 3]
    assert first.metrics["rollout/buffered_groups"] == 8.0
    assert service.ledger.balance() == settled(4, finished=8)
    assert [draws_of(service.next_step(step)) for step in (2, 3)] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    publish(service, engines, 1)
    wait_until(lambda: service.ledger.balance()["finished"] == 4)


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("kind", ["sglang", "embedded"])
def test_no_token_is_too_old_and_every_draw_is_accounted_for(
    make_service, engines, staleness, kind
):
    """Draw by draw, some take a hundred times as long as others."""
    for engine in engines:
        engine.seconds = lambda draw: 0.02 if draw % 7 == 0 else 0.0002
    given = rollout(
        staleness, engine={"kind": kind}, filters=["user_parts:even_draws"], oversample=1.5
    )
    service = make_service(engines=engines, rollout=given, training={"steps": 20})
    publish(service, engines, 0)
    seen: list[int] = []
    there: set[int] = set()
    for step in range(1, 21):
        rollouts = service.next_step(step)
        there |= ages(rollouts, step)
        assert len(rollouts.samples) == 8
        seen += draws_of(rollouts)
        time.sleep(0.01)  # the trainer trains
        publish(service, engines, step)
    assert max(there) == staleness, "as far ahead as it may be, and no further"
    assert len(seen) == len(set(seen)) == 80
    assert all(draw % 2 == 0 for draw in seen)
    balance = service.ledger.balance()
    assert balance["consumed"] == 80
    assert sum(balance.values()) == len(service.ledger)


def test_the_trainer_waits_for_a_long_answer_rather_than_leave_it_behind(make_service, engines):
    hold(engines, lambda draw: draw == 1)
    service = make_service(engines=engines, rollout=rollout(1))
    publish(service, engines, 0)
    steps = []
    for step in (1, 2, 3):
        if step == 2:
            threading.Timer(0.3, release, [engines]).start()
        steps.append(draws_of(service.next_step(step)))
        publish(service, engines, step)
    assert 1 not in steps[0], "nobody waits as long as it is in time"
    assert 1 in steps[1], "the last step that may take it"


def test_a_group_is_as_old_as_its_oldest_token(make_service, engines):
    hold(engines, lambda draw: draw > 7)
    service = make_service(engines=engines, rollout=rollout(2), training={"steps": 3})
    publish(service, engines, 0)
    wait_until(lambda: service.ledger.balance()["finished"] == 8)
    wait_until(lambda: sum(engine.running for engine in engines) == 4)
    publish(service, engines, 1)
    release(engines)
    wait_until(lambda: service.ledger.balance()["finished"] == 12)
    service.next_step(1)
    buffered_steps = {
        group["draw"]: group["policy_steps"] for group in service.snapshot()["ahead"]["groups"]
    }
    assert buffered_steps == {draw: [0, 0] if draw < 8 else [0, 1] for draw in range(4, 12)}


def test_nothing_is_made_for_steps_that_the_run_does_not_have(make_service, engines):
    service = make_service(engines=engines, rollout=rollout(3), training={"steps": 3})
    publish(service, engines, 0)
    train(service, engines, range(1, 4))
    assert service.ledger.balance() == settled(12)


def test_engines_get_no_more_than_they_have_room_for(make_service, engines):
    for engine in engines:
        engine.seconds = lambda draw: 0.002
    hold(engines)
    given = rollout(4, engine={"kind": "sglang", "max_in_flight": 3})
    service = make_service(engines=engines, rollout=given, training={"steps": 4})
    publish(service, engines, 0)
    wait_until(lambda: sum(engine.running for engine in engines) == 6)
    assert service.ledger.balance()["in flight"] <= 6, (
        "the others are not started before there is room"
    )
    release(engines)
    wait_until(lambda: service.ledger.balance()["finished"] == 16)
    assert [engine.most for engine in engines] == [3, 3]


def test_embedded_engines_get_one_batch_after_the_other(make_service):
    engine = FakeEngine(random_reply(31), delay_s=0.01)
    given = rollout(2, engine={"max_batch": 12})
    service = make_service(engines=[engine], rollout=given, training={"steps": 3})
    publish(service, [engine], 0)
    wait_until(lambda: service.ledger.balance()["finished"] == 12)
    assert [[request.draw for request in call] for call in engine.calls] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    ]


# --- filters --------------------------------------------------------------------------------------


def test_what_over_sampling_leaves_over_is_kept_while_it_is_young_enough(make_service, engines):
    service = make_service(
        engines=engines, rollout=rollout(1, oversample=1.5), training={"steps": 4}
    )
    publish(service, engines, 0)
    wait_until(lambda: service.ledger.balance()["finished"] == 12)
    first = service.next_step(1)
    second = service.next_step(2)
    assert [draws_of(first), draws_of(second)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [one.metrics["rollout/buffered_groups"] for one in (first, second)] == [8.0, 0.0]
    assert [one.metrics["rollout/dropped_stale"] for one in (first, second)] == [0.0, 4.0]
    assert {one.metrics["rollout/requeued_prompts"] for one in (first, second)} == {0.0}
    assert [service.ledger.state(draw) for draw in (8, 11)] == ["requeued", "requeued"]


def test_a_group_that_no_step_can_take_any_more_is_drawn_again(make_service, engines):
    """Over-sampling may leave a group without a place: it expires, its prompt does not."""
    for engine in engines:
        engine.seconds = lambda draw: 0.4 if draw == 11 else 0.001
    service = make_service(
        engines=engines, rollout=rollout(1, oversample=1.5), training={"steps": 12}
    )
    publish(service, engines, 0)
    stale = 0.0
    seen: list[int] = []
    for step in range(1, 13):
        rollouts = service.next_step(step)
        stale += rollouts.metrics["rollout/dropped_stale"]
        assert max(ages(rollouts, step)) <= 1
        seen += draws_of(rollouts)
        for engine in engines:
            engine.seconds = lambda draw: 0.001
        publish(service, engines, step)
    assert stale >= 1
    assert len(seen) == len(set(seen)) == 48
    assert 11 in seen
    assert [engine.draws.count(11) for engine in engines if 11 in engine.draws] in ([2], [1, 1])


def test_filters_that_leave_too_little_are_named(make_service, engines):
    service = make_service(engines=engines, rollout=rollout(2, filters=["user_parts:no_draws"]))
    publish(service, engines, 0)
    with pytest.raises(
        EmptyBatch, match=r"step 1 has 0 of 4 groups after \d+ draws: no_draws dropped 64"
    ):
        service.next_step(1)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_failure_meets_the_trainer_at_its_next_call_and_then_it_goes_on(make_service, engines):
    service = make_service(engines=engines, rollout=rollout(1))
    for engine in engines:
        engine.failure = RuntimeError("out of memory")
    publish(service, engines, 0)
    with pytest.raises(RunFailed, match=r"engine [ab] failed: RuntimeError: out of memory"):
        service.next_step(1)
    for engine in engines:
        engine.failure = None
    while True:  # others may have failed before the engines were well
        try:
            rollouts = service.next_step(1)
            break
        except RunFailed:
            time.sleep(0.01)
    assert draws_of(rollouts) == [0, 1, 2, 3]
    assert sum(service.ledger.balance().values()) == len(service.ledger)


def test_a_broken_filter_is_named(make_service, engines):
    service = make_service(
        engines=engines, rollout=rollout(1, filters=["user_parts:broken_filter"])
    )
    publish(service, engines, 0)
    with pytest.raises(RunFailed, match=r"broken_filter failed on .*no groups"):
        service.next_step(1)


def test_an_engine_that_answers_with_weights_of_long_ago_ends_the_run(make_service, engines):
    """It says so by its versions; drawn again and again, its groups would be made until
    `rollout.timeout_s`.
    """
    service = make_service(engines=engines, rollout=rollout(1, timeout_s=60.0))
    publish(service, engines, 0)
    for step in (1, 2):
        service.next_step(step)
    service.published(2, 5, 0)
    with pytest.raises(
        EmptyBatch, match=r"step 3 has 0 of 4 groups after \d+ draws: stale dropped 64"
    ):
        service.next_step(3)


def test_a_step_that_hangs_names_who_is_waited_for(make_service, engines):
    for engine in engines:
        engine.seconds = lambda draw: 60.0
    service = make_service(engines=engines, rollout=rollout(1, timeout_s=0.3))
    publish(service, engines, 0)
    wait_until(lambda: sum(engine.running for engine in engines) == 8)
    expected = (
        r"step 1 has no rollouts after 0\.3 s \(rollout\.timeout_s\): 8 of the prompts wait for"
        r" engine a \(4 requests\)"
    )
    with pytest.raises(DeadlineExceeded, match=expected):
        service.next_step(1)
    assert service.ledger.balance()["in flight"] == 8, "they go on"


def test_before_the_first_publication_nothing_can_come(make_service, engines):
    service = make_service(engines=engines, rollout=rollout(1, timeout_s=0.2))
    with pytest.raises(
        DeadlineExceeded, match=r"step 1 has no rollouts after 0\.2 s .*: weights to be published"
    ):
        service.next_step(1)


def test_an_evaluation_runs_beside(make_service, engines, tmp_path):
    for engine in engines:
        engine.seconds = lambda draw: 0.01
    evaluation = {"paths": [str(tmp_path / "sums.jsonl")], "max_prompts": 6}
    service = make_service(engines=engines, rollout=rollout(2), evaluation=evaluation)
    publish(service, engines, 0)
    _, samples = service.evaluate()
    assert len(samples) == 6
    assert draws_of(service.next_step(1)) == [0, 1, 2, 3]


def test_closing_ends_what_is_in_flight(make_service, engines):
    for engine in engines:
        engine.seconds = lambda draw: 60.0
    service = make_service(engines=engines, rollout=rollout(2))
    publish(service, engines, 0)
    wait_until(lambda: sum(engine.running for engine in engines) == 12)
    began = time.monotonic()
    service.close()
    assert time.monotonic() - began < 20
    assert sum(engine.running for engine in engines) == 0
    assert service.ledger.balance()["requeued"] == 12


# --- state ----------------------------------------------------------------------------------------


def test_a_resumed_service_has_the_groups_that_were_finished(make_service, engines):
    given = {"rollout": rollout(2), "training": {"steps": 4}}
    service = make_service(engines=engines, **given)
    publish(service, engines, 0)
    wait_until(lambda: service.ledger.balance()["finished"] == 12)
    service.next_step(1)
    publish(service, engines, 1)
    wait_until(lambda: service.ledger.balance()["finished"] == 12)
    state = json.loads(json.dumps(service.snapshot()))
    expected = [draws_of(service.next_step(step)) for step in (2, 3)]

    again = [Continuous(random_reply(31), name="c")]
    resumed = make_service(engines=again, **given)
    resumed.restore(state)
    assert resumed.ledger.balance() == settled(4, finished=8)
    assert again[0].draws == [], "generation begins with the publication"
    publish(resumed, again, 1, version=9)
    steps = [resumed.next_step(step) for step in (2, 3)]
    assert [draws_of(one) for one in steps] == expected
    assert ages(steps[0], 2) == {1}
    assert min(again[0].draws) == 12, "none of those was asked for again"
    publish(resumed, again, 2, version=11)
    publish(resumed, again, 3, version=13)
    assert draws_of(resumed.next_step(4)) == [12, 13, 14, 15]
    assert resumed.ledger.balance() == settled(16)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (3, 1)])
def test_a_run_may_go_on_with_another_bound(make_service, engines, before, after):
    service = make_service(engines=engines, rollout=rollout(before), training={"steps": 9})
    publish(service, engines, 0)
    train(service, engines, range(1, 4))
    state = json.loads(json.dumps(service.snapshot()))
    resumed = make_service(engines=engines, rollout=rollout(after), training={"steps": 9})
    resumed.restore(state)
    publish(resumed, engines, 3, version=20)
    seen, there = train(resumed, engines, range(4, 10), offset=20)
    assert max(there) <= after
    assert sorted(seen) == list(range(12, 36))
    assert resumed.ledger.balance() == settled(36)


def test_a_service_that_outlives_its_trainer_gives_up_what_later_weights_made(
    make_service, engines
):
    """The trainer goes back from step 3 to the checkpoint of step 1."""
    service = make_service(engines=engines, rollout=rollout(2), training={"steps": 9})
    publish(service, engines, 0)
    service.next_step(1)
    saved = json.loads(json.dumps(service.snapshot()))
    for step in (1, 2, 3):
        publish(service, engines, step)
        wait_until(lambda: quiet(service))
        if step < 3:
            service.next_step(step + 1)
    service.restore(saved)
    publish(service, engines, 1, version=20)
    seen, there = train(service, engines, range(2, 10), offset=20)
    assert there <= {0, 1, 2}
    assert len(seen) == len(set(seen)) == 32
    assert service.ledger.balance() == settled(36)


@pytest.mark.parametrize("buffered", [True, False])
def test_a_service_in_the_place_of_a_lost_one_is_told_of_weights_that_it_knows(
    make_service, engines, buffered
):
    """It died after the hand-over of step 2, before the weights of that step were published."""
    given = {"rollout": rollout(2), "training": {"steps": 4}}
    lost = make_service(engines=engines, **given)
    publish(lost, engines, 0, version=3)
    lost.next_step(1)
    publish(lost, engines, 1, version=4)
    lost.next_step(2)
    made = make_service(engines=engines, **given)
    state = json.loads(json.dumps(lost.snapshot()))
    if not buffered:
        state["ahead"] = {"groups": [], "versions": []}
    made.restore(state)
    publish(made, engines, 1, version=4)
    assert made.ledger.balance()["in flight"] == 0, (
        "they will not be in force when step 3 is trained"
    )
    publish(made, engines, 2, version=5)
    assert max(ages(made.next_step(3), 3)) <= 2
    publish(made, engines, 3, version=6)
    made.next_step(4)
    assert made.ledger.balance() == settled(16)


def test_a_step_may_be_abandoned(make_service, engines):
    hold(engines)
    service = make_service(engines=engines, rollout=rollout(1))
    publish(service, engines, 0)
    waits = threading.Event()
    wait_for_stale = service.fleet.wait_for_stale

    def next_step_waits():
        waits.set()
        return wait_for_stale()

    def abandon() -> None:
        assert waits.wait(60)
        service.abandon()

    service.fleet.wait_for_stale = next_step_waits
    abandoning = threading.Thread(target=abandon)
    abandoning.start()
    with pytest.raises(asyncio.CancelledError):
        service.next_step(1)
    abandoning.join(60)
    release(engines)
    assert draws_of(service.next_step(1)) == [0, 1, 2, 3]


def test_a_lost_service_draws_no_more_and_leaves_the_ledger_to_the_other(make_service, tmp_path):
    """It works on while another has taken its place."""
    path = tmp_path / "ledger.jsonl"
    lost, other = (
        make_service(engines=[FakeEngine(random_reply(31), name=name)], rollout=rollout(2))
        for name in "ab"
    )
    lost.keep_ledger(path)
    lost.published(0, 0, 0)
    wait_until(lambda: lost.ledger.balance()["finished"] >= 12)

    other.restore(None)  # nothing was handed over yet
    other.keep_ledger(path)
    before = path.read_bytes()
    lost.published(1, 1, 0)  # there is room for more
    with pytest.raises(RunFailed, match=r"another service writes .*/ledger\.jsonl: "):
        lost.next_step(1)
    lost.close()
    assert path.read_bytes() == before

    other.published(0, 0, 0)
    other.next_step(1)
    other.close()
    history = read_journal(path)
    assert history.at().snapshot() == other.ledger.snapshot()
    assert [at for _, at in history.starts] == [0, 0]
