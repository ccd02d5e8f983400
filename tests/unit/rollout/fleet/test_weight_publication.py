"""A publication by one rank to engines in this process; others are in tests/integration/engine."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from engine_kit import flatten, layout, request, tiny_qwen3

from rlcore.config import Config
from rlcore.data.sample import VersionSpan
from rlcore.errors import DeadlineExceeded, PublicationFailed, RunFailed
from rollout.asyncio_utils import within
from rollout.engines.embedded.engine import EmbeddedEngine
from tests.one_rank import OneRank, calls_of
from tests.static_participants import StaticParticipants


def make_config(folder, **engine):
    limits = {"device": "cpu", "request_timeout_s": 20.0, "update_timeout_s": 10.0}
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": str(folder), "dtype": "fp32"},
            "data": {"paths": "none.jsonl"},
            "training": {"steps": 1},
            "rollout": {"engine": limits | engine},
        }
    )


@pytest.fixture
def loop():
    """An event loop in a thread of its own, as the rollout service has."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def run(loop, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)


@pytest.fixture
def engines(folder, loop):
    config = make_config(folder).rollout.engine
    engines = [
        EmbeddedEngine(str(folder), config=config, dtype="fp32", name=f"engine-{i}")
        for i in range(3)
    ]
    for engine in engines:
        run(loop, engine.start())
    yield engines
    for engine in engines:
        run(loop, engine.close())


def publish_once(publication, model, version):
    buckets = layout(model)
    publication.prepare(buckets)
    for bucket in buckets:
        publication.send(bucket, flatten(bucket, model))
    publication.finish(version)


def test_every_engine_gets_the_weights_and_the_version(model, folder, loop, engines):
    participants = StaticParticipants(engines)
    publication = OneRank(make_config(folder), participants, loop)
    publish_once(publication, model, 7)
    for engine in engines:
        held = engine._started()[1].tensors
        assert all(torch.equal(held[name], value) for name, value in model.named_parameters())
        [[completion]] = run(loop, engine.generate([request([1, 2])]))
        assert completion.versions == (VersionSpan(7, 0, 8),)
    publish_once(publication, tiny_qwen3(seed=1), 8)
    assert {engine.version for engine in engines} == {8}
    publication.close()


@pytest.mark.parametrize("step", ["pause", "begin_update", "end_update", "set_version", "resume"])
def test_an_engine_that_fails_a_step_is_dropped_and_the_others_go_on(
    model, folder, loop, engines, step, monkeypatch
):
    async def fail(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(engines[1], step, fail)
    participants = StaticParticipants(engines)
    publication = OneRank(make_config(folder), participants, loop)
    publish_once(publication, model, 1)
    assert [engine.name for engine in participants.engines] == ["engine-0", "engine-2"]
    assert participants.dropped == {"engine-1": "RuntimeError: no such luck"}
    assert engines[0].version == engines[2].version == 1
    # it takes no traffic
    with pytest.raises(RunFailed, match="engine-1: the engine is closed"):
        run(loop, engines[1].generate([request([1])]))


def test_a_base_goes_to_the_engines_that_lack_it(model, folder, loop, engines, monkeypatch):
    async def hold():
        return {"base": True}

    async def fail():
        raise RuntimeError("no such luck")

    events = []
    participants = StaticParticipants(engines)
    participants.draining = lambda engine: events.append(f"draining {engine.name}")
    monkeypatch.setattr(engines[0], "health", hold)
    publication = OneRank(make_config(folder), participants, loop)
    assert publication.prepare(layout(model), is_base=True)
    assert events == ["draining engine-1", "draining engine-2"]
    publication.cancel()
    monkeypatch.setattr(engines[1], "health", hold)
    # Of an engine that drains alone does the fleet accept that it failed in a publication.
    monkeypatch.setattr(engines[2], "health", fail)
    assert not publication.prepare(layout(model), is_base=True)
    assert events[2:] == ["draining engine-2"]
    assert participants.dropped == {"engine-2": "RuntimeError: no such luck"}
    publication.close()


def test_an_engine_that_misses_a_bucket_means_a_second_run_with_the_others(
    model, folder, loop, engines, monkeypatch
):
    whole = engines[2].receive_bucket

    async def fail(index, flat):
        if index == 1:
            raise RuntimeError("out of memory")
        await whole(index, flat)

    monkeypatch.setattr(engines[2], "receive_bucket", fail)
    participants = StaticParticipants(engines)
    publication = OneRank(make_config(folder), participants, loop)
    with pytest.raises(PublicationFailed, match=r"bucket 1: .*out of memory"):
        publish_once(publication, model, 1)
    publication.cancel()
    assert engines[0].version is None  # paused, and stale until the whole update
    publish_once(publication, model, 2)
    assert [engine.version for engine in participants.engines] == [2, 2]


def test_an_engine_may_fail_at_what_it_still_takes_when_the_others_have_failed(
    model, folder, loop, engines, monkeypatch
):
    """The transport waits for what engines were called for, also in a transaction that failed."""
    participants = StaticParticipants(engines)
    publication = OneRank(make_config(folder), participants, loop)
    publication.prepare(layout(model))

    async def give_up():
        return {engines[1]: "engine-1 hangs", engines[2]: "engine-2 is out already"}

    monkeypatch.setattr(publication.publication._transport, "give_up", give_up)
    publication.publication._engines.remove(engines[2])
    publication.cancel()
    assert participants.dropped == {"engine-1": "engine-1 hangs"}
    assert publication.publication._engines == [engines[0]]


def test_an_engine_that_fails_costs_the_others_no_connection(
    model, folder, loop, engines, monkeypatch
):
    class Late(StaticParticipants):
        """The last engine waits for weights."""

        async def stale(self):
            return self.engines[2:]

    async def fail(*_):
        raise RuntimeError("out of memory")

    publication = OneRank(make_config(folder), Late(engines), loop)
    publish_once(publication, model, 1)
    closed = []
    monkeypatch.setattr(
        publication.publication._transport, "close", lambda: closed.append(True) or asyncio.sleep(0)
    )
    monkeypatch.setattr(engines[2], "receive_bucket", fail)
    publication.prepare(layout(model), only_stale=True)
    with pytest.raises(PublicationFailed, match="out of memory"):
        publication.send(layout(model)[0], flatten(layout(model)[0], model))
    publication.cancel()
    assert not closed
    publish_once(publication, model, 2)
    assert [engine.version for engine in engines[:2]] == [2, 2]


def test_participants_are_told_before_a_pause_and_after_a_whole_version(
    model, folder, loop, engines, monkeypatch
):
    said = []

    class Noted(StaticParticipants):
        async def stale(self):
            return self.engines[2:]

        def draining(self, engine):
            said.append(("draining", engine.name))

        def published(self, engine, version):
            said.append(("published", engine.name, version, engine.version))

        def missed(self, engine):
            said.append(("missed", engine.name))

    pause = engines[2].pause
    monkeypatch.setattr(
        engines[2], "pause", lambda mode: said.append(("pause", "engine-2")) or pause(mode)
    )
    publication = OneRank(make_config(folder), Noted(engines), loop)
    publish_once(publication, model, 3)
    names = [engine.name for engine in engines]
    assert said == [
        *(("draining", name) for name in names),
        ("pause", "engine-2"),
        *(("published", name, 3, 3) for name in names),
    ]
    assert publication.publication._transport.has_all_engines
    said.clear()
    publication.prepare(layout(model), only_stale=True)
    assert not publication.publication._transport.has_all_engines
    publication.cancel()
    assert said == [("draining", "engine-2"), ("pause", "engine-2"), ("missed", "engine-2")]


def test_no_engine_left_ends_the_run_with_every_reason(model, folder, loop, engines):
    publication = OneRank(make_config(folder), StaticParticipants(engines[:2]), loop)
    with pytest.raises(
        RunFailed, match=r"no engine is left.*engine-0: .*missing model.*engine-1: "
    ) as caught:
        publication.prepare(layout(model)[1:])
    assert "model.embed_tokens.weight" in str(caught.value)


def test_an_engine_that_hangs_is_dropped_at_its_deadline(model, folder, loop, engines, monkeypatch):
    async def hang(*_):
        await asyncio.sleep(600)

    def within_its_own(seconds, work, late):
        """The others have as long as they need."""
        return within(seconds if "engine-0" in late() else 60.0, work, late)

    monkeypatch.setattr(engines[0], "begin_update", hang)
    monkeypatch.setattr("rollout.weight_sync.base.TRANSPORT_GRACE_S", 0.1)
    monkeypatch.setattr("rollout.weight_sync.base.within", within_its_own)
    participants = StaticParticipants(engines)
    publication = OneRank(make_config(folder, update_timeout_s=0.5), participants, loop)
    publish_once(publication, model, 1)
    assert participants.dropped == {
        "engine-0": "engine engine-0 did not answer begin_update within 0.5 s"
    }


def test_a_loop_that_is_stuck_is_named(model, folder, loop, engines):
    publication = OneRank(make_config(folder), StaticParticipants(engines), loop)
    freed = threading.Event()
    loop.call_soon_threadsafe(freed.wait, 20)
    calls = calls_of(publication.publication, loop, 0.2)
    with pytest.raises(DeadlineExceeded, match=r"event loop did nothing for 0\.2 s"):
        calls("stop")
    assert not freed.is_set()
    freed.set()
