"""Engines that are slow, full or stuck: what is aborted, and what is restarted."""

from __future__ import annotations

import asyncio

import pytest

from rollout.fleet.engine_states import ProgressClock

LIMIT_S = 0.3


async def moving(engine, stop: asyncio.Event) -> None:
    """Have the engine make a token now and then."""
    while not stop.is_set():
        engine.tokens_made += 1
        await asyncio.sleep(0.05)


async def answered(site, requests):
    """The answers to `requests`, of engines that make tokens all the time."""
    stop = asyncio.Event()
    work = [asyncio.ensure_future(moving(engine, stop)) for engine in site.engines]
    try:
        return await asyncio.gather(*(site.dispatcher.one(request) for request in requests))
    finally:
        stop.set()
        await asyncio.gather(*work)


@pytest.mark.site("a", progress_timeout_s=LIMIT_S)
async def test_an_engine_that_is_slow_is_left_alone(site, request_of):
    """One response takes four times the limit of a standstill."""
    site.engines[0].delay_s = 4 * LIMIT_S
    [[completion]] = await answered(site, [request_of(1)])
    assert completion.finish_reason == "length"
    assert (site.fleet.restarts, site.dispatcher.retried, site.dispatcher.overdue) == (0, 0, 0)


@pytest.mark.site("a", progress_timeout_s=LIMIT_S)
async def test_requests_that_queue_in_an_engine_are_left_alone(site, request_of):
    """It serves one at a time: the last has waited ten times as long as it takes."""
    [a] = site.engines
    one_at_a_time = asyncio.Lock()
    generate = a.generate

    async def queued(requests):
        async with one_at_a_time:
            return await generate(requests)

    a.generate = queued
    a.delay_s = 0.1
    answers = await answered(site, [request_of(i) for i in range(10)])
    assert {answer[0].finish_reason for answer in answers} == {"length"}
    assert (site.fleet.restarts, site.dispatcher.retried) == (0, 0)


@pytest.mark.site("ab", progress_timeout_s=LIMIT_S, restart={"backoff_s": 30.0})
async def test_an_engine_that_stands_still_with_requests_is_restarted(site):
    a, b = site.engines
    a.delay_s = 600
    await asyncio.sleep(2 * LIMIT_S)
    assert site.fleet.restarts == 0, "without requests it may stand still"
    calls = [asyncio.ensure_future(site.one(i)) for i in range(2)]
    await asyncio.gather(*calls)
    assert [len(engine.calls) for engine in (a, b)] == [1, 2]
    assert site.fleet.members[0].health.why == (
        "engine a has 1 requests and made no token for 0.3 s (rollout.engine.progress_timeout_s)"
    )
    assert site.states() == "dead serving"


@pytest.mark.site("ab", progress_timeout_s=LIMIT_S, restart={"backoff_s": 30.0})
async def test_it_is_restarted_in_a_publication_too_if_it_shall_finish_its_requests(site):
    a, _ = site.engines
    a.delay_s = 600
    call = asyncio.ensure_future(site.one(1))
    await asyncio.sleep(0.02)
    site.fleet.draining(a)
    await call
    assert site.states() == "dead serving"


@pytest.mark.parametrize("limit", ["progress_timeout_s", "request_timeout_s"])
def test_a_pause_counts_for_neither(on_site, limit):
    async def use(site):
        [a] = site.engines
        a.delay_s = 4 * LIMIT_S
        call = asyncio.ensure_future(site.one(1))
        await asyncio.sleep(0.02)
        site.fleet.draining(a)
        a.tokens_made = None  # as an engine says of itself while a pause holds its requests
        [completion] = await call
        assert completion.finish_reason == "length"
        assert site.fleet.members[0].held_s > 3 * LIMIT_S
        assert (site.fleet.restarts, site.dispatcher.overdue) == (0, 0)

    on_site("a", use, **{limit: LIMIT_S})


@pytest.mark.site("a", request_timeout_s=2 * LIMIT_S, progress_timeout_s=LIMIT_S)
async def test_the_time_of_a_request_passes_at_an_engine_that_tells_no_progress(site):
    """As behind a router, which may lose a request. No engine counts as hung for that."""
    [a] = site.engines
    a.delay_s = 600
    a.tokens_made = None
    [completion] = await site.one(5)
    assert completion.finish_reason == "abort"
    assert (site.dispatcher.overdue, site.fleet.restarts) == (1, 0)


@pytest.mark.site("a", request_timeout_s=0.1)
async def test_a_request_whose_time_is_up_is_aborted_and_its_engine_goes_on(site):
    [a] = site.engines
    a.delay_s = 600
    [completion] = await site.one(5)
    assert completion.finish_reason == "abort"
    assert len(completion.tokens) == 2, "what it had"
    assert a.aborted == ["0-5-0-0"]
    a.delay_s = 0.0
    [other] = await site.one(6)
    assert other.finish_reason == "length"
    assert (site.dispatcher.overdue, site.dispatcher.retried) == (1, 0)
    assert site.fleet.restarts == 0


def test_one_that_is_lost_in_its_engine_is_sent_again(on_site, monkeypatch):
    monkeypatch.setattr("rollout.fleet.dispatcher.ABORT_S", 0.1)

    async def use(site):
        [a] = site.engines
        a.delay_s = 600
        a.deaf = True
        call = asyncio.ensure_future(site.one(5))
        await asyncio.sleep(0.15)
        a.delay_s = 0.0
        [completion] = await call
        assert completion.finish_reason == "length"
        assert (len(a.calls), site.dispatcher.retried, site.fleet.restarts) == (2, 1, 0)

    on_site("a", use, request_timeout_s=0.1)


@pytest.mark.site("ab", restart={"backoff_s": 30.0})
async def test_an_engine_that_reports_no_progress_at_all_is_told_so(site):
    async def undefined():
        raise NotImplementedError("no progress here")

    a, _ = site.engines
    a.delay_s = 600
    a.progress = lambda: undefined()
    await site.one(1)
    assert site.fleet.members[0].health.why == "NotImplementedError: no progress here"


def test_the_clock_stands_only_where_the_same_thing_is_seen():
    clock = ProgressClock(10.0)
    assert clock.look(15.0, None) == 0.0
    assert clock.look(16.0, "a") == 0.0
    assert clock.look(18.0, "a") == 2.0
    assert clock.look(19.0, "b") == 0.0
    assert clock.look(20.0, None) == 0.0
    assert clock.look(21.0, "b") == 0.0
