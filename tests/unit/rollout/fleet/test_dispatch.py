"""Requests over engines that fail: each is answered exactly once, where it is cheapest."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngine

from rlcore.data.sample import VersionSpan
from rlcore.errors import (
    EngineFailed,
    EngineHangs,
    InvalidAnswer,
    NoEngineLeft,
    RunFailed,
    UserError,
)


def tokens(answers):
    return [[completion.tokens.tolist() for completion in row] for row in answers]


@pytest.mark.site("abc")
async def test_the_least_loaded_engine_is_asked(site):
    for engine in site.engines:
        engine.delay_s = 0.05
    await asyncio.gather(*(site.one(i) for i in range(30)))
    assert [len(engine.calls) for engine in site.engines] == [10, 10, 10]


@pytest.mark.site("ab")
async def test_a_conversation_stays_where_its_prefix_is_unless_that_engine_is_much_busier(site):
    a, b = site.engines
    a.delay_s = b.delay_s = 0.1
    await asyncio.gather(site.one(0), site.one(1))
    assert [call[0].draw for call in b.calls] == [1]
    await site.one(1, turn=1)  # both are idle, and a comes first
    assert [call[0].turn for call in b.calls] == [0, 1]
    a.delay_s = 0.0
    busy = [asyncio.ensure_future(site.one(1, turn=2 + i)) for i in range(20)]
    await asyncio.gather(*busy)
    assert len(b.calls) < 12, "the others moved"


@pytest.mark.site("ab")
async def test_the_conversations_of_a_prompt_stay_each_where_it_was(site, request_of):
    """Many of one prompt spread over engines; later turns follow their own, not the newest."""
    a, b = site.engines
    a.delay_s = b.delay_s = 0.05
    for turn in range(2):
        requests = [replace(request_of(3, turn=turn), first_sample=sample) for sample in range(12)]
        await asyncio.gather(*(site.dispatcher.one(one) for one in requests))
    for engine in (a, b):
        turns = [{r.first_sample for [r] in engine.calls if r.turn == t} for t in range(2)]
        assert turns[0] == turns[1] != set()


@pytest.mark.site("ab", max_in_flight=3)
async def test_conversations_stay_where_they_were_while_all_engines_are_full(site):
    """An engine with room takes a caller whose prefix it has before the others that wait."""
    for number, engine in enumerate(site.engines):
        engine.delay_s = 0.004 + 0.003 * number

    async def talk(draw):
        for turn in range(6):
            await site.one(draw, turn=turn)

    await asyncio.gather(*(talk(draw) for draw in range(24)))
    seen = {}
    for engine in site.engines:
        for [request] in engine.calls:
            seen.setdefault(request.draw, {})[request.turn] = engine.name
    assert {len(turns) for turns in seen.values()} == {6}
    moves = sum(turns[i] != turns[i + 1] for turns in seen.values() for i in range(5))
    assert moves < 12, f"{moves} of 120 turns began anew elsewhere"


@pytest.mark.site("ab", max_in_flight=3)
async def test_no_engine_gets_more_than_max_in_flight(site):
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    generate = FakeEngine.generate

    async def counted(self, requests):
        running[self.name] += 1
        most[self.name] = max(most[self.name], running[self.name])
        try:
            return await generate(self, requests)
        finally:
            running[self.name] -= 1

    for engine in site.engines:
        engine.delay_s = 0.005
        engine.generate = counted.__get__(engine)
    await asyncio.gather(*(site.one(i) for i in range(50)))
    assert most == {"a": 3, "b": 3}


@pytest.mark.parametrize("fault", ["raises", "dies", "hangs", "too few", "sick"])
def test_requests_of_an_engine_that_fails_are_answered_once_by_another(on_site, fault):
    async def use(site):
        a, b = site.engines
        if fault == "raises":
            a.failure = EngineFailed("engine a: 500")
        elif fault == "too few":
            a._complete = lambda *_: None
            a.generate = lambda requests: asyncio.sleep(0, [[] for _ in requests])
        else:
            a.delay_s = 600
        calls = [asyncio.ensure_future(site.one(i, n=2)) for i in range(20)]
        await asyncio.sleep(0.02)
        if fault == "dies":
            await site.fleet.failed(a, "killed")
        if fault == "sick":
            a.probe_error = EngineFailed("engine a does not answer")
        answers = await asyncio.gather(*calls)
        assert [len(answer) for answer in answers] == [2] * 20
        assert tokens(answers) == tokens([await site.one(i, n=2) for i in range(20)])
        served = Counter(call[0].draw for call in b.calls[:20])
        assert set(served.values()) == {1}, "b answered none twice"
        assert site.fleet.restarts <= 1
        assert site.dispatcher.retried >= 10, "an answer too short is no failure yet"

    on_site(
        "ab", use, progress_timeout_s=0.3 if fault == "hangs" else 10.0, restart={"backoff_s": 30.0}
    )


LIES = {
    "token beyond the vocabulary": ({"tokens": [1, 2, 2_000_000_000, 3]}, "tokens from 1 to 2000"),
    "negative token": ({"tokens": [1, -7, 2, 3]}, "tokens from -7 to 3 of a vocabulary of 31"),
    "too many tokens": ({"tokens": [1] * 5}, "5 tokens, expected 1 to 4"),
    "log-prob that is no number": (
        {"logprobs": [-1, np.nan, -1, -1]},
        "the log-prob of trainable token 1 is nan",
    ),
    "infinite log-prob": (
        {"logprobs": [-1, -np.inf, -1, -1]},
        "the log-prob of trainable token 1 is -inf",
    ),
    "probability above 1": (
        {"logprobs": [-1, 5, -1, -1]},
        "the log-prob of trainable token 1 is 5.0",
    ),
    "log-probs of other tokens": ({"logprobs": [-1, -1]}, "logprobs of float32 (2,), expected"),
    "tokens without a version": ({"versions": ()}, "do not cover 4 tokens"),
    "overlapping versions": (
        {"versions": (VersionSpan(1, 0, 3), VersionSpan(1, 2, 4))},
        "do not cover 4 tokens",
    ),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.site("ab", restart={"backoff_s": 30.0})
async def test_an_engine_that_answers_what_cannot_be_is_replaced(site, request_of, lie, caplog):
    """Nothing of it is trained on, and nothing of it ends the run."""
    changes, why = LIES[lie]
    a, b = site.engines
    honest = a.generate

    async def lying(requests):
        [[one]] = await honest(requests)
        tokens = np.array(changes.get("tokens", [1, 2, 3, 4]), dtype=np.int32)
        logprobs = changes.get("logprobs", [-1.0] * len(tokens))
        versions = changes.get("versions", (VersionSpan(1, 0, len(tokens)),))
        made = replace(
            one, tokens=tokens, logprobs=np.array(logprobs, dtype=np.float32), versions=versions
        )
        return [[made]]

    a.generate = lying
    [answer] = await site.one(0)
    assert answer.tokens.tolist() == b.reply(request_of(0), 0)
    assert site.states() == "serving serving", "the request may be at fault"
    await asyncio.gather(*(site.one(draw) for draw in range(1, 9)))
    assert site.states() == "dead serving"
    assert "engine a failed: engine a returned an invalid completion" in caplog.text
    assert why in caplog.text


@pytest.mark.site("ab")
async def test_an_answer_that_does_not_fit_fails_its_request_first(site):
    """It goes to the other engine next. After two in a row a good one clears the count."""
    honest = [engine.generate for engine in site.engines]

    async def empty(requests):
        return [[] for _ in requests]

    def answer(*calls):
        for engine, call in zip(site.engines, calls):
            engine.generate = call

    for draw in range(4):
        answer(empty, empty)
        with pytest.raises(InvalidAnswer, match=r"returned \[0\] completions, expected \[1\]"):
            await site.one(draw)
        answer(*honest)
        await asyncio.gather(*(site.one(draw + other) for other in (0, 10, 20, 30)))
    assert site.states() == "serving serving"
    assert site.fleet.restarts == 0


@pytest.mark.site("ab", restart={"backoff_s": 30.0})
async def test_a_request_that_one_engine_answers_wrongly_goes_to_another(site):
    """Although that engine has its prompt, and serves all others."""
    a = site.engines[0]
    honest = a.generate
    wrong = []

    async def sometimes(requests):
        if requests[0].draw:
            return await honest(requests)
        wrong.append(requests)
        return [[] for _ in requests]

    a.generate = sometimes
    for turn in range(3):
        await asyncio.gather(site.one(0, turn=turn), *(site.one(draw) for draw in range(1, 5)))
    assert len(wrong) <= 3
    assert site.states() == "serving serving"


@pytest.mark.site("a", restart={"backoff_s": 30.0})
async def test_the_only_engine_gets_a_request_again(site):
    [only] = site.engines
    honest = only.generate

    async def empty(requests):
        only.generate = honest
        return [[] for _ in requests]

    only.generate = empty
    [answer] = await asyncio.wait_for(site.one(0), 60)
    assert len(answer.tokens)
    assert site.fleet.restarts == 0


@pytest.mark.site("ab", retries=1)
async def test_the_last_attempt_comes_after_a_restart(site):
    """With few attempts the first answer that does not fit counts as the engine's."""
    honest = [engine.generate for engine in site.engines]

    async def empty(requests):
        for engine, call in zip(site.engines, honest):
            engine.generate = call
        return [[] for _ in requests]

    for engine in site.engines:
        engine.generate = empty
    [answer] = await site.one(0)
    assert len(answer.tokens)
    assert site.fleet.restarts <= 1


@pytest.mark.site("ab", restart={"backoff_s": 30.0})
async def test_an_answer_that_comes_too_late_is_dropped(site):
    """The engine is declared dead while its answer is under way: the request counts once,
    elsewhere.
    """
    a, b = site.engines
    a.delay_s = 0.05
    call = asyncio.ensure_future(site.one(7))
    await asyncio.sleep(0.01)
    assert len(a.calls) == 1
    await site.fleet.failed(a, "declared dead")
    await call
    assert len(b.calls) == 1
    await asyncio.sleep(0.1)
    assert site.dispatcher.retried == 1


@pytest.mark.site("ab", restart={"backoff_s": 30.0})
async def test_so_is_one_of_an_engine_that_does_not_let_itself_be_interrupted(site):
    a, b = site.engines
    generate = a.generate

    async def stubborn(requests):
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return await generate(requests)

    a.generate = stubborn
    call = asyncio.ensure_future(site.one(7))
    await asyncio.sleep(0.01)
    await site.fleet.failed(a, "declared dead")
    await call
    assert len(b.calls) == 1
    assert site.dispatcher.retried == 1


@pytest.mark.site("ab")
async def test_a_bad_request_is_not_sent_again(site):
    site.engines[0].failure = UserError("draw 0: too long")
    with pytest.raises(UserError, match="too long"):
        await site.one(0)
    assert [len(engine.calls) for engine in site.engines] == [1, 0]
    assert site.states() == "serving serving"
    assert site.dispatcher.retried == 0


@pytest.mark.site("ab")
async def test_a_defect_of_ours_is_not_sent_again(site):
    site.engines[0].failure = ZeroDivisionError("oops")
    with pytest.raises(RunFailed, match="engine a failed: ZeroDivisionError: oops"):
        await site.one(0)
    assert len(site.engines[1].calls) == 0


@pytest.mark.site("abcd", retries=2, restart={"backoff_s": 30.0})
async def test_retries_end(site):
    for engine in site.engines:
        engine.failure = EngineFailed(f"engine {engine.name}: garbage")
    with pytest.raises(EngineFailed, match="engine c: garbage"):
        await site.one(0)
    assert [len(engine.calls) for engine in site.engines] == [1, 1, 1, 0]
    assert site.dispatcher.retried == 2


def test_a_deadline_names_engine_request_and_key(on_site, monkeypatch):
    async def use(site):
        [a] = site.engines
        a.delay_s = 60
        a.deaf = True
        with pytest.raises(
            EngineHangs,
            match=r"engine a did not answer 1 requests \(the first: 0-5-0-0\) within 0.1 s"
            r" \(rollout.engine.request_timeout_s\), nor their abort within 0.1 s",
        ):
            await site.one(5)
        assert site.states() == "serving"
        assert site.fleet.restarts == 0

    monkeypatch.setattr("rollout.fleet.dispatcher.ABORT_S", 0.1)
    on_site("a", use, retries=0, request_timeout_s=0.1)


@pytest.mark.site("a", restart={"backoff_s": 0.1})
async def test_a_request_waits_for_an_engine_that_comes_back(site):
    catching_up = asyncio.ensure_future(site.catch_up_forever())
    await site.fleet.failed(site.engines[0], "killed")
    began = asyncio.get_running_loop().time()
    [completion] = await site.one(1)
    assert completion.versions[0].version == 1
    assert asyncio.get_running_loop().time() - began >= 0.1
    assert site.fleet.restarts == 1
    catching_up.cancel()


@pytest.mark.site("ab", max_in_flight=2, restart={"limit": 0})
async def test_where_none_can_come_everybody_hears_why(site):
    for engine in site.engines:
        engine.delay_s = 600
    calls = [asyncio.ensure_future(site.one(i)) for i in range(8)]
    await asyncio.sleep(0.01)
    for engine in site.engines:
        await site.fleet.failed(engine, f"{engine.name} burnt")
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {NoEngineLeft}
    assert "engine a: a burnt; engine b: b burnt" in str(outcomes[0])


@pytest.mark.site("a", max_in_flight=1)
async def test_cancelled_requests_leave_no_lease(site):
    site.engines[0].delay_s = 0.05
    calls = [asyncio.ensure_future(site.one(i)) for i in range(6)]
    await asyncio.sleep(0.01)
    for call in calls[:4]:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert [call.cancelled() for call in calls] == [True] * 4 + [False] * 2
    assert site.fleet.members[0].leases == set()
    assert site.fleet.describe_wait() == ""
    assert await site.one(9)


@pytest.mark.site("ab")
async def test_a_caller_cancelled_while_the_engine_fails_is_cancelled(site):
    site.engines[0].delay_s = 60
    call = asyncio.ensure_future(site.one(0))
    await asyncio.sleep(0.01)
    call.cancel()
    await site.fleet.failed(site.engines[0], "at the same moment")
    await asyncio.wait({call})
    assert call.cancelled()
    assert site.dispatcher.retried == 0


@pytest.mark.site("a", max_in_flight=1, retries=0, restart={"limit": 0})
async def test_a_caller_cancelled_while_the_last_engine_ends_is_cancelled(site):
    site.engines[0].delay_s = 60
    calls = [asyncio.ensure_future(site.one(i)) for i in range(2)]
    await asyncio.sleep(0.01)
    assert "an engine with room" in site.fleet.describe_wait()
    await_end = asyncio.ensure_future(site.fleet.failed(site.engines[0], "burnt"))
    # the one in line has NoEngineLeft, and has not run since
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.wait({*calls, await_end})
    assert calls[1].cancelled()


@pytest.mark.parametrize("state", ["dead", "stale", "draining"])
def test_only_engines_that_serve_are_asked(on_site, state):
    async def use(site):
        a, b = site.engines
        if state == "draining":
            site.fleet.draining(a)
        else:
            await site.fleet.failed(a, "killed")
            await site.until(f"{state} serving")
        await asyncio.gather(*(site.one(i) for i in range(10)))
        assert [len(engine.calls) for engine in (a, b)] == [0, 10]

    on_site(
        "ab", use, restart={"backoff_s": 0.02 if state == "stale" else 30.0, "max_backoff_s": 30.0}
    )


@pytest.mark.parametrize("then", ["the engine fails", "the caller gives up"])
@pytest.mark.site("a", max_in_flight=1, retries=0, restart={"limit": 0})
async def test_a_lease_that_is_granted_in_the_moment_when(site, then):
    """A request that waited for room has the lease, and has not run since."""
    site.engines[0].delay_s = 0.05
    first, second = (asyncio.ensure_future(site.one(i)) for i in range(2))
    while not first.done():
        await asyncio.sleep(0)
    [lease] = site.fleet.members[0].leases
    assert lease.caller is None, "granted, not used"
    if then == "the engine fails":
        await site.fleet.failed(site.engines[0], "burnt")
        with pytest.raises(EngineFailed, match="burnt"):
            await second
        assert len(site.engines[0].calls) == 1
    else:
        second.cancel()
        await asyncio.wait({second})
        assert await site.one(2), "there is room again"
    assert site.fleet.members[0].leases == set()


@pytest.mark.site("ab", max_batch=4, restart={"backoff_s": 30.0})
async def test_batches_are_the_same_whichever_engines_are_alive(site, request_of):
    requests = [request_of(i, n=2) for i in range(11)]
    whole = await site.dispatcher.batch(requests)
    calm = [[r.draw for r in call] for engine in site.engines for call in engine.calls]
    for engine in site.engines:
        engine.calls.clear()
    await site.fleet.failed(site.engines[0], "killed")
    assert tokens(await site.dispatcher.batch(requests)) == tokens(whole)
    assert sorted([r.draw for r in call] for call in site.engines[1].calls) == sorted(calm)
    assert calm == [[0, 2], [4, 6], [8, 10], [1, 3], [5, 7], [9]]


@pytest.mark.site("ab", restart={"backoff_s": 30.0})
async def test_a_batch_that_fails_is_made_whole_again(site, request_of):
    requests = [request_of(i) for i in range(6)]
    expected = tokens(await site.dispatcher.batch(requests))
    site.engines[1].failure = EngineFailed("engine b: 500")
    assert tokens(await site.dispatcher.batch(requests)) == expected
    assert site.dispatcher.retried == 3


@pytest.mark.site("ab", max_in_flight=2)
async def test_the_engine_that_is_waited_for_is_named(site):
    for engine in site.engines:
        engine.delay_s = 0.1
    calls = [asyncio.ensure_future(site.one(i)) for i in range(5)]
    await asyncio.sleep(0.01)
    assert (
        site.fleet.describe_wait()
        == "engine a (2 requests), engine b (2 requests), an engine with room (a is serving, b"
        " is serving)"
    )
    await asyncio.gather(*calls)
    assert site.fleet.describe_wait() == ""
    assert 0.1 < site.dispatcher.busy_seconds < 1.0


@pytest.mark.site("ab")
async def test_time_in_which_calls_overlap_counts_once(site):
    a, b = site.engines
    a.delay_s = 4.0
    b.delay_s = 4.5
    first = asyncio.ensure_future(site.one(0))
    await asyncio.sleep(1.0)
    await asyncio.gather(first, site.one(1))
    assert site.dispatcher.busy_seconds == pytest.approx(5.5, abs=0.05)
    await asyncio.sleep(3.5)
    a.delay_s = 0.25
    await site.one(2)
    assert site.dispatcher.busy_seconds == pytest.approx(5.75, abs=0.05)
