"""Engines that fail and come back: who notices, how often it is said, and what has to happen before
they serve again.
"""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine

from rlcore.deadlines import ENGINE_GRACE_S
from rlcore.errors import EngineFailed, NoEngineLeft, RunFailed
from rollout.fleet import probes
from rollout.fleet.probes import MISSED


@pytest.mark.site("ab", publish=False)
async def test_an_engine_serves_only_after_a_publication(site):
    assert site.states() == "stale stale"
    assert [engine.name for engine in await site.fleet.candidates()] == ["a", "b"]
    await site.publish(3)
    assert site.states() == "serving serving"
    assert [member.version for member in site.fleet.members] == [3, 3]


@pytest.mark.site("ab")
async def test_probes_that_fail_in_a_row_mean_a_restart(site):
    a = site.engines[0]
    probed = a.health
    errors = [EngineFailed("a hiccup"), None] * (MISSED + 1)

    async def health():
        a.probe_error = errors.pop(0) if errors else EngineFailed("engine a does not answer")
        missed.append(a.probe_error is not None)
        return await probed()

    missed = []
    a.health = health
    await site.until("dead serving")
    expected = [True, False] * (MISSED + 1) + [True] * MISSED
    assert missed[: len(expected)] == expected
    a.health = probed
    a.probe_error = None
    await site.until("stale serving")
    assert (a.starts, site.fleet.restarts) == (2, 1)
    assert site.fleet.members[0].health.why == "engine a does not answer"
    assert site.fleet.members[0].version is None
    await site.publish(1, only_stale=True)
    assert site.states() == "serving serving"


@pytest.mark.site("ab")
async def test_a_probe_without_an_answer_means_a_restart(site, monkeypatch):
    async def never(self):
        await asyncio.sleep(60)

    monkeypatch.setattr(site.engines[1], "health", never.__get__(site.engines[1]))
    await site.until("serving dead", seconds=2 * ENGINE_GRACE_S)
    assert (
        "engine b answered no probe within 0.2 s (rollout.engine.health_timeout_s)"
        in site.fleet._ends()
    )


@pytest.mark.site("ab")
async def test_a_silent_engine_that_completes_requests_lives(site, monkeypatch):
    """As long as it does: a scheduler answers a probe only between two batches."""
    monkeypatch.setattr(probes, "ENGINE_GRACE_S", 0.0)

    async def never(self):
        await asyncio.sleep(60)

    monkeypatch.setattr(site.engines[1], "health", never.__get__(site.engines[1]))
    member = site.fleet.members[1]
    for _ in range(20):
        member.answers += 1
        await asyncio.sleep(0.1)
    assert site.states() == "serving serving"
    await site.until("serving dead")


def test_the_end_of_a_process_is_noticed_at_once(on_site, monkeypatch):
    async def use(site):
        engine = site.engines[0]
        engine.ended.set_result(None)
        await site.until("dead serving", seconds=1)

    async def with_process(self):
        self.ended = asyncio.get_running_loop().create_future()

    monkeypatch.setattr(FakeEngine, "start", with_process)
    on_site("ab", use, health_every_s=600.0)


@pytest.mark.site("ab")
async def test_an_engine_in_a_publication_is_not_probed(site):
    probes = []

    async def count(self):
        probes.append(self.name)
        if self.probe_error is not None:
            raise self.probe_error

    for engine in site.engines:
        engine.health = count.__get__(engine)
    site.fleet.draining(site.engines[0])
    site.engines[0].probe_error = EngineFailed("busy with weights")
    await asyncio.sleep(0.3)
    assert site.states() == "draining serving"
    assert set(probes) == {"b"}
    site.fleet.missed(site.engines[0])
    await site.until("dead serving")


@pytest.mark.site("ab")
async def test_a_failure_is_declared_once(site, caplog):
    a = site.engines[0]
    await asyncio.gather(*(site.fleet.failed(a, f"reason {i}") for i in range(3)))
    await site.until("stale serving")
    assert site.fleet.restarts == 1
    assert [r.message for r in caplog.records if "engine a failed" in r.message] == [
        "engine a failed: reason 0; it is started again in 0.02 s"
    ]


@pytest.mark.site("ab")
async def test_a_failure_before_a_restart_does_not_harm_the_engine_after_it(site):
    lease = await site.fleet.router.lease("x", room=9)
    await site.fleet.failed(lease.member.engine, "first")
    await site.until("stale serving")
    site.fleet.lost(lease, EngineFailed("late news of the first"))
    assert site.states() == "stale serving"
    assert lease.lost == "engine a failed: first"


@pytest.mark.site("ab")
async def test_a_publication_that_ends_after_the_engine_failed_leaves_it_dead(site):
    site.fleet.draining(site.engines[0])
    await site.fleet.failed(site.engines[0], "in the middle")
    site.fleet.published(site.engines[0], 2)
    assert site.states() == "dead serving"
    await site.until("stale serving")
    site.fleet.published(site.engines[0], 2)
    assert site.states() == "stale serving", "its new life took no part"


@pytest.mark.site("ab")
async def test_a_step_that_failed_before_a_restart_does_not_harm_the_engine_after_it(site):
    """The others of a publication may take their time: until all have answered, one that died can
    be back.
    """
    a, b = site.engines
    for engine in (a, b):
        site.fleet.draining(engine)
    await site.fleet.failed(a, "killed")
    await site.until("stale draining")
    await site.fleet.out(a, "it did not answer begin_update: killed")
    assert site.states() == "stale draining"
    assert (a.starts, site.fleet.restarts) == (2, 1)
    await site.fleet.out(b, "it did not answer begin_update")
    assert site.states() == "stale dead"


@pytest.mark.site("ab", restart={"backoff_s": 5.0})
async def test_failed_returns_when_the_engine_is_ended(site):
    await site.fleet.failed(site.engines[0], "enough")
    assert site.engines[0].closed


@pytest.mark.site("ab", restart={"backoff_s": 0.01, "max_backoff_s": 0.02, "limit": 3})
async def test_restarts_that_fail_are_tried_again_up_to_the_limit(site, monkeypatch):
    tries = []

    async def broken(self):
        tries.append(self.name)
        raise RunFailed("no memory")

    monkeypatch.setattr(FakeEngine, "start", broken)
    await site.fleet.failed(site.engines[0], "first")
    await asyncio.sleep(0.5)
    assert tries == ["a"] * 3
    assert site.states() == "dead serving"
    assert "engine a: it did not start again: no memory" in site.fleet._ends()


@pytest.mark.site("ab")
async def test_what_no_engine_should_raise_is_a_failure_too(site, monkeypatch):
    """Nothing that a client does leaves an engine unwatched, or neither dead nor alive."""
    tries = []

    async def broken(self):
        tries.append(self.name)
        if len(tries) < 3:
            raise KeyError("port")

    monkeypatch.setattr(FakeEngine, "start", broken)
    monkeypatch.setattr(FakeEngine, "kill", broken)
    site.engines[0].probe_error = ZeroDivisionError("a probe")
    await site.until("dead serving")
    assert site.fleet.members[0].health.why == "ZeroDivisionError: a probe"
    site.engines[0].probe_error = None
    await site.until("stale serving")
    assert site.fleet.members[0].health.starts == 3


def test_a_restart_that_hangs_meets_its_deadline(on_site, monkeypatch):
    monkeypatch.setattr("rollout.fleet.fleet.TRANSPORT_GRACE_S", 0.0)

    async def use(site):
        monkeypatch.setattr(FakeEngine, "start", lambda self: asyncio.sleep(60))
        await site.fleet.failed(site.engines[0], "first")
        await asyncio.sleep(0.6)
        assert (
            "engine a was not ready after 0.2 s (rollout.engine.start_timeout_s)"
            in site.fleet._ends()
        )

    on_site("a", use, start_timeout_s=0.2, restart={"backoff_s": 0.01, "limit": 1})


def test_an_engine_that_does_not_end_is_started_again_all_the_same(on_site, monkeypatch, caplog):
    monkeypatch.setattr("rollout.fleet.fleet.KILL_ENGINE_S", 0.1)

    async def use(site):
        monkeypatch.setattr(FakeEngine, "kill", lambda self: asyncio.sleep(60))
        await site.fleet.failed(site.engines[0], "first")
        await site.until("stale")
        assert "engine a could not be ended within 0.1 s" in caplog.text

    on_site("a", use)


@pytest.mark.site("ab")
async def test_pause_starts_returns_when_no_engine_is_starting(site, monkeypatch):
    may_start = asyncio.Event()
    monkeypatch.setattr(FakeEngine, "start", lambda self: may_start.wait())
    await site.fleet.failed(site.engines[0], "first")
    await site.until("starting serving")
    holding = asyncio.ensure_future(site.fleet.pause_starts())
    await asyncio.sleep(0.05)
    assert not holding.done(), "its memory is on the way"
    may_start.set()
    await asyncio.wait_for(holding, 5)
    assert site.states() == "stale serving"


@pytest.mark.site("ab", colocated=True)
async def test_on_a_shared_device_an_engine_waits_for_weights_until_no_other_serves(site):
    a, b = site.engines
    await site.fleet.failed(a, "first")
    await site.until("stale serving")
    waiting = asyncio.ensure_future(site.fleet.wait_for_stale())
    await asyncio.sleep(0.05)
    assert not waiting.done(), "b would lose its requests"
    await site.fleet.failed(b, "second")
    await asyncio.wait_for(waiting, 5)


@pytest.mark.site("ab")
async def test_a_publication_waits_for_an_engine_that_comes_back(site):
    await asyncio.gather(*(site.fleet.failed(engine, "gone") for engine in site.engines))
    assert site.states() == "dead dead"
    [first, *_] = await site.fleet.candidates()
    assert first in site.engines


@pytest.mark.site("ab", restart={"limit": 0})
async def test_a_publication_does_not_wait_for_engines_that_are_gone_for_good(site):
    await asyncio.gather(
        *(site.fleet.failed(engine, f"{engine.name} burnt") for engine in site.engines)
    )
    with pytest.raises(
        NoEngineLeft, match=r"rollout.engine.restart.*engine a: a burnt; engine b: b burnt"
    ):
        await site.fleet.candidates()


@pytest.mark.site(
    "a", start_timeout_s=0.1, restart={"backoff_s": 0.2, "max_backoff_s": 0.2, "limit": 1}
)
async def test_a_publication_waits_no_longer_than_a_start_takes(site, monkeypatch):
    monkeypatch.setattr(FakeEngine, "start", lambda self: asyncio.sleep(60))
    await site.fleet.failed(site.engines[0], "gone")
    with pytest.raises(
        NoEngineLeft,
        match=(
            r"no engine came back within 0.3 s \(rollout.engine.start_timeout_s\): engine a: it"
            r" is starting; before, gone$"
        ),
    ):
        await site.fleet.candidates()
