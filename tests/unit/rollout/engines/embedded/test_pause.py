"""Abort and the pause modes, with new weights put in between two tokens."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from engine_kit import (
    Steps,
    flatten,
    layout,
    load,
    logprobs_under,
    publish,
    request,
    tiny_qwen3,
    with_engine,
)

from rlcore.data.sample import VersionSpan
from rlcore.errors import RunFailed
from rollout.engines.embedded.decoding import Decoding
from rollout.engines.embedded.engine import PauseGate

LONG = 400  # tokens: enough to be caught in the middle
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10]]


@pytest.fixture
def most_made():
    """How many tokens of a batch were made, at most."""
    return [0]


@pytest.fixture
def steps(monkeypatch, most_made):
    step = Decoding.step

    def watched(self, version):
        step(self, version)
        most_made[0] = max(most_made[0], self.made)

    monkeypatch.setattr(Decoding, "step", watched)
    return Steps(monkeypatch, 20, once=True)


@pytest.fixture
def in_the_middle(steps):
    """An awaitable: returns once a batch has made 20 tokens, behind which it is held until it is
    told something.
    """
    return steps.are_made


def requests_of(length=LONG):
    return [request(p, draw=i, n=2, max_new_tokens=length) for i, p in enumerate(PROMPTS)]


def interrupted(folder, model, in_the_middle, mode, other, **config):
    async def use(engine):
        running = asyncio.create_task(engine.generate(requests_of()))
        await in_the_middle()
        await publish(engine, other, 2, mode)
        return await running

    return [c for row in with_engine(folder, model, use, **config) for c in row]


def test_retract_computes_everything_again_under_the_new_weights(model, folder, in_the_middle):
    other = tiny_qwen3(seed=1)
    prompts = [p for p in PROMPTS for _ in range(2)]
    for prompt, completion in zip(
        prompts, interrupted(folder, model, in_the_middle, "retract", other)
    ):
        first, second = completion.versions
        assert (first.version, first.start, second.version, second.end) == (1, 0, 2, LONG)
        assert 20 <= first.end == second.start < LONG
        cut = first.end
        np.testing.assert_allclose(
            completion.logprobs[:cut], logprobs_under(model, prompt, completion)[:cut], atol=1e-4
        )
        np.testing.assert_allclose(
            completion.logprobs[cut:], logprobs_under(other, prompt, completion)[cut:], atol=1e-4
        )


def test_in_place_goes_on_with_the_old_keys(model, folder, in_the_middle):
    other = tiny_qwen3(seed=1)
    completion = interrupted(folder, model, in_the_middle, "in_place", other)[0]
    first, second = completion.versions
    assert (first.version, second.version, second.end) == (1, 2, LONG)
    cut = first.end
    np.testing.assert_allclose(
        completion.logprobs[:cut], logprobs_under(model, PROMPTS[0], completion)[:cut], atol=1e-4
    )
    fresh = logprobs_under(other, PROMPTS[0], completion)[cut:]
    assert np.abs(completion.logprobs[cut:] - fresh).max() > 1e-2


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_update_with_the_same_weights_changes_no_token(model, folder, in_the_middle, mode):
    disturbed = interrupted(folder, model, in_the_middle, mode, model)
    calm = [
        c for row in with_engine(folder, model, lambda e: e.generate(requests_of())) for c in row
    ]
    for a, b in zip(calm, disturbed):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert a.versions == (VersionSpan(1, 0, LONG),)
        assert [span.version for span in b.versions] == [1, 2]


def test_drain_finishes_what_runs_and_holds_what_comes_later(model, folder, in_the_middle):
    async def use(engine):
        running = asyncio.create_task(engine.generate(requests_of()))
        await in_the_middle()
        await engine.pause("drain")
        was_done = engine._gate._open_tickets == set()
        later = asyncio.create_task(engine.generate(requests_of(4)))
        await load(engine, tiny_qwen3(seed=1), 2)
        held = not (await asyncio.wait([later], timeout=0.2))[0]
        await engine.resume()
        return was_done, held, await running, await later

    was_done, held, ran, later = with_engine(folder, model, use)
    assert was_done
    assert held
    assert {c.versions for row in ran for c in row} == {(VersionSpan(1, 0, LONG),)}
    assert {c.versions for row in later for c in row} == {(VersionSpan(2, 0, 4),)}


def test_pause_with_abort_ends_what_runs_and_what_waits(model, folder, in_the_middle):
    async def use(engine):
        running = asyncio.create_task(engine.generate(requests_of()))
        waiting = asyncio.create_task(engine.generate(requests_of()))
        await in_the_middle()
        await publish(engine, model, 2, "abort")
        return await running, await waiting, await engine.generate(requests_of(3))

    ran, waited, after = with_engine(folder, model, use)
    for completion in (c for row in ran for c in row):
        assert completion.finish_reason == "abort"
        assert 20 <= len(completion.tokens) == len(completion.logprobs) < LONG
        assert completion.versions == (VersionSpan(1, 0, len(completion.tokens)),)
    assert {(c.finish_reason, len(c.tokens), c.versions) for row in waited for c in row} == {
        ("abort", 0, ())
    }
    assert {c.versions for row in after for c in row} == {(VersionSpan(2, 0, 3),)}


def test_abort_keeps_finished_responses_and_needs_no_resume(model, folder, in_the_middle):
    async def use(engine):
        mixed = [request([3], draw=0, max_new_tokens=5), request([4], draw=1, max_new_tokens=LONG)]
        running = asyncio.create_task(engine.generate(mixed))
        await in_the_middle()
        await engine.abort()
        return await running, await engine.generate(requests_of(2))

    ([short], [long]), after = with_engine(folder, model, use)
    assert (short.finish_reason, len(short.tokens)) == ("length", 5)
    assert long.finish_reason == "abort"
    assert {c.finish_reason for row in after for c in row} == {"length"}


def test_an_update_broken_off_leaves_the_engine_stale_until_a_whole_one(
    model, folder, in_the_middle
):
    async def use(engine):
        running = asyncio.create_task(engine.generate(requests_of()))
        await in_the_middle()
        await engine.pause("retract")
        await engine.begin_update(layout(model))
        await engine.receive_bucket(0, flatten(layout(model)[0], model))
        with pytest.raises(RunFailed, match="ended without bucket"):
            await engine.end_update()
        await engine.resume()
        with pytest.raises(RunFailed, match="stale"):
            await running
        with pytest.raises(RunFailed, match="stale"):
            await engine.generate(requests_of(2))
        await publish(engine, model, 3)
        return await engine.generate(requests_of(2))

    result = with_engine(folder, model, use)
    assert {c.versions for row in result for c in row} == {(VersionSpan(3, 0, 2),)}


def test_closing_ends_requests_with_an_error(model, folder, in_the_middle):
    async def use(engine):
        running = asyncio.create_task(engine.generate(requests_of()))
        await in_the_middle()
        await engine.close()
        with pytest.raises(RunFailed, match=r"engine-0.*closed"):
            await running
        with pytest.raises(RunFailed, match="engine-0: the engine is closed"):
            await engine.generate(requests_of(2))

    with_engine(folder, model, use)


def test_a_cancelled_call_stops_at_its_next_token(model, folder, in_the_middle, most_made):
    async def use(engine):
        running = asyncio.create_task(engine.generate(requests_of()))
        await in_the_middle()
        running.cancel()
        await engine.pause("drain")
        with pytest.raises(asyncio.CancelledError):
            await running
        await engine.resume()
        assert engine._gate._open_tickets == engine._gate._abandoned == set()
        return await engine.generate(requests_of(2))

    assert {c.finish_reason for row in with_engine(folder, model, use) for c in row} == {"length"}
    assert 20 <= most_made[0] < LONG, "nobody waits for the rest"


def test_calls_are_aborted_by_the_ids_of_their_requests(model, folder, in_the_middle):
    async def use(engine):
        running = asyncio.create_task(engine.generate(requests_of()))
        waiting = asyncio.create_task(engine.generate([request([3], draw=8)]))
        behind = asyncio.create_task(engine.generate([request([3], draw=9)]))
        await in_the_middle()
        await engine.abort(["0-1-0-0", "0-8-0-0"])
        return await asyncio.gather(running, waiting, behind)

    calls = with_engine(folder, model, use)
    reasons = [{one.finish_reason for row in answers for one in row} for answers in calls]
    assert reasons == [{"abort"}, {"abort"}, {"length"}]
    assert all(20 <= len(one.tokens) < LONG for row in calls[0] for one in row)
    assert len(calls[1][0][0].tokens) == 0


def test_the_event_loop_stays_responsive_while_it_generates(model, folder, in_the_middle, steps):
    async def use(engine):
        running = asyncio.create_task(engine.generate(requests_of()))
        await in_the_middle()
        steps.let()
        turns = 0
        while not running.done():
            await asyncio.sleep(0.002)
            turns += 1
        return turns

    assert with_engine(folder, model, use) > 10


def test_a_pause_that_cannot_take_effect_ends_with_the_engine():
    gate = PauseGate("engine-7")
    gate.enter()  # a call that never reaches the gate
    threading.Timer(0.05, gate.close).start()
    with pytest.raises(RunFailed, match=r"engine-7: the engine was closed before it was paused"):
        gate.pause("drain")
