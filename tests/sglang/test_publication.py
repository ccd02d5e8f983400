"""Publications into a real server, in every mode, and when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from publication_kit import (
    PROMPT,
    TOLERANCE,
    Oracle,
    connect,
    flatten,
    folder_weights,
    layout,
    publish,
    random_weights,
    request,
    run_config,
    sink_over,
)
from server_kit import Served

from rlcore.data.generation import Completion
from rlcore.data.sample import VersionSpan
from rlcore.errors import EngineFailed, PublicationFailed, RunFailed
from rlcore.interfaces import RankAddress
from rollout.engines.sglang.engine import SGLangEngine
from rollout.weight_sync.groups.sender import GroupSender
from rollout.weight_sync.links import DistributedTransport
from rollout.weight_sync.serialized import by_value
from tests.man_in_the_middle import ManInTheMiddle

LONG = list(range(1, 30)) * 3  # a prompt whose keys and values are worth caching
Engines = Callable[..., SGLangEngine]


@pytest.fixture
def engines(served: Served, tmp_path: Path) -> Iterator[Engines]:
    """`engines(on_update=..., ...)` is one more client of the session's server. It is left running
    with its own weights.
    """
    made: list[SGLangEngine] = []

    def make(**changes: Any) -> SGLangEngine:
        config = run_config(str(served.model), tmp_path, served.config, **changes)
        made.append(connect(config, served.url, served.keys, served.loop))
        return made[-1]

    yield make
    last = make()
    sink, _ = sink_over(run_config(str(served.model), tmp_path, served.config), [last], served.loop)
    publish(sink, folder_weights(served.model), 1)
    sink.close()
    for engine in made:
        served.call(engine.close())


def generate(served: Served, engine: SGLangEngine, **asked: Any) -> Completion:
    [[completion]] = served.call(engine.generate([request(**asked)]))
    return completion


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_the_server_generates_with_what_was_published(
    served: Served, engines: Engines, tmp_path: Path, transport: str
) -> None:
    engine = engines(transport=transport)
    sink, participants = sink_over(
        run_config(str(served.model), tmp_path, served.config, transport=transport),
        [engine],
        served.loop,
    )
    for version, seed in ((5, 1), (6, 2)):
        weights = random_weights(served.model, seed)
        publish(sink, weights, version)
        completion = generate(served, engine, draw=version)
        assert completion.versions == (VersionSpan(version, 0, 12),)
        assert Oracle(served.model, weights).errors(PROMPT, completion).max() < TOLERANCE
    assert (
        Oracle(served.model, random_weights(served.model, 1)).errors(PROMPT, completion).max() > 0.1
    )
    assert served.call(engine.health())["version"] == 6
    assert participants.dropped == {}
    sink.close()


@pytest.mark.parametrize("mode", ["drain", "retract", "in_place", "abort"])
def test_an_update_while_responses_are_made(
    served: Served, engines: Engines, tmp_path: Path, mode: str
) -> None:
    """Every token carries its weights' version; later requests never use old keys and values."""
    config = run_config(str(served.model), tmp_path, served.config, on_update=mode)
    engine = engines(on_update=mode)
    sink, _ = sink_over(config, [engine], served.loop)
    old, new = (Oracle(served.model, random_weights(served.model, seed)) for seed in (1, 2))
    publish(sink, random_weights(served.model, 1), 10)
    generate(served, engine, prompt=LONG, tokens=2)  # into the cache
    pending = [start(served, engine, draw) for draw in (1, 2)]
    served.call(served.until_used(len(LONG) + 2 * 50))
    publish(sink, random_weights(served.model, 2), 11)
    later = generate(served, engine, prompt=LONG, draw=3)
    assert later.versions == (VersionSpan(11, 0, 12),)
    assert new.errors(LONG, later).max() < TOLERANCE
    for completion in (future.result(120)[0][0] for future in pending):
        made = len(completion.tokens)
        first = completion.versions[0]
        assert first.version == 10
        assert 0 < first.end <= made
        assert old.errors(LONG, completion)[: first.end].max() < TOLERANCE
        if mode in ("retract", "in_place"):
            assert completion.finish_reason == "length"
            assert completion.versions == (
                VersionSpan(10, 0, first.end),
                VersionSpan(11, first.end, made),
            )
            assert (new.errors(LONG, completion)[first.end :].max() < TOLERANCE) == (
                mode == "retract"
            )
        else:
            assert completion.versions == (first,)
            assert completion.finish_reason == ("length" if mode == "drain" else "abort")
    sink.close()


def start(served: Served, engine: SGLangEngine, draw: int) -> Future[list[list[Completion]]]:
    """Start a long response."""
    return asyncio.run_coroutine_threadsafe(
        engine.generate([request(LONG, draw=draw, tokens=300)]), served.loop.loop
    )


def test_without_a_key_of_its_version_a_cached_prefix_would_be_stale(
    served: Served, engines: Engines, tmp_path: Path
) -> None:
    """What `in_place` does not flush is there, and wrong by nats: only the key keeps it from later
    requests.
    """
    config = run_config(str(served.model), tmp_path, served.config, on_update="in_place")
    engine = engines(on_update="in_place")
    sink, _ = sink_over(config, [engine], served.loop)
    publish(sink, random_weights(served.model, 1), 10)
    generate(served, engine, prompt=LONG)
    publish(sink, random_weights(served.model, 2), 11)
    new = Oracle(served.model, random_weights(served.model, 2))
    generation = engine._generation
    assert generation is not None
    [stale] = served.call(generation.one(request(LONG), cache_key="10"))
    assert new.errors(LONG, stale).max() > 0.1
    assert new.errors(LONG, generate(served, engine, prompt=LONG)).max() < TOLERANCE
    sink.close()


def test_a_part_of_an_update_is_nobodys_version(served: Served, engines: Engines) -> None:
    engine = engines()
    weights = random_weights(served.model, 3)
    buckets = layout(weights)

    async def part() -> None:
        await engine.pause("drain")
        await engine.begin_update(buckets)
        await engine.receive_serialized(0, [by_value(buckets[0], flatten(buckets[0], weights))])
        await engine.end_update()

    with pytest.raises(EngineFailed, match=rf"ended without buckets 1, 2.* of {len(buckets)}"):
        served.call(part())
    with pytest.raises(EngineFailed, match="version 3 cannot be set, the weights are updating"):
        served.call(engine.set_version(3))
    with pytest.raises(
        EngineFailed, match=r"its weights are stale \(updating\): publish a whole update"
    ):
        served.call(engine.resume())
    assert served.call(engine.health())["version"] is None


def test_what_a_dead_trainer_left_behind_stops_nobody(
    served: Served, engines: Engines, tmp_path: Path
) -> None:
    """It died during an update: the server is paused, an update open, and a group left over."""
    dead = engines()
    weights = random_weights(served.model, 5)
    config = run_config(str(served.model), tmp_path, served.config)
    sink, _ = sink_over(config, [dead], served.loop)
    buckets = layout(weights)
    sink.prepare(buckets)
    sink.send(buckets[0], flatten(buckets[0], weights))
    served.call(dead.close())
    sink.close()  # as the end of its process does: the server waits for the second bucket

    engine = engines()
    successor, _ = sink_over(config, [engine], served.loop)
    publish(successor, weights, 8)
    assert Oracle(served.model, weights).errors(PROMPT, generate(served, engine)).max() < TOLERANCE
    successor.close()


def test_a_bucket_that_fails_means_the_whole_transaction_again(
    served: Served, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two clients refuses a bucket: the other stays paused and takes the next attempt."""
    config = run_config(str(served.model), tmp_path, served.config, transport="tensor")
    good = engines(transport="tensor")
    bad = engines(transport="tensor")

    async def refuse(index: int, payloads: list[str]) -> None:
        raise EngineFailed("engine bad: out of memory")

    monkeypatch.setattr(bad, "receive_serialized", refuse)
    sink, participants = sink_over(config, [good, bad], served.loop)
    weights = random_weights(served.model, 6)
    with pytest.raises(
        PublicationFailed, match="not all engines took the weights up to bucket 0: engine bad: out"
    ):
        publish(sink, weights, 20)
    sink.cancel()
    with pytest.raises(EngineFailed, match=r"its weights are stale \(updating\)"):
        served.call(good.resume())
    assert participants.engines == [good]
    publish(sink, weights, 21)
    completion = generate(served, good)
    assert completion.versions == (VersionSpan(21, 0, 12),)
    assert Oracle(served.model, weights).errors(PROMPT, completion).max() < TOLERANCE
    sink.close()


def test_calls_that_come_in_another_order_than_the_buckets_wait_for_their_turn(
    served: Served, engines: Engines
) -> None:
    """The trainer posts a call before the last one was answered, over another connection."""
    engine = engines(transport="distributed")
    assert engine.queues_buckets
    weights = random_weights(served.model, 9)
    buckets = layout(weights)

    async def update() -> None:
        await engine.pause("drain")
        await engine.begin_update(buckets)
        transport = DistributedTransport(timeout_s=60.0, probe_s=10.0)
        transport.ranks = [RankAddress("here")]
        assert await transport.open([engine], buckets) == {}
        sender = GroupSender(torch.device("cpu"), 60.0)
        answers = {0: sender.open(transport.orders().ranks[0], buckets)}
        assert await transport.join(answers) == {}
        sender._end_joining()
        group = sender._groups[engine.name]
        calls = []
        for bucket in reversed(buckets):
            calls.append(asyncio.ensure_future(engine.receive_bucket(bucket.index, None)))
            await asyncio.sleep(0.05)
        for bucket in buckets:
            await asyncio.wrap_future(group.start_sending(flatten(bucket, weights)))
        await asyncio.gather(*calls)
        await engine.end_update()
        await engine.set_version(30)
        await engine.resume()
        sender.close()

    served.call(update())
    assert Oracle(served.model, weights).errors(PROMPT, generate(served, engine)).max() < TOLERANCE


def test_a_byte_that_is_changed_on_the_way_takes_the_engine_out(
    served: Served, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"transport": "distributed"}
    config = run_config(str(served.model), tmp_path, served.config, **changes)
    engine = engines(**changes)
    man = ManInTheMiddle(None)
    man.stand_before(engine, monkeypatch)
    sink, participants = sink_over(config, [engine], served.loop)
    weights = random_weights(served.model, 8)
    publish(sink, weights, 8)
    assert man.seen == [flatten(bucket, weights).numpy().tobytes() for bucket in layout(weights)]
    man.flips = (2, 100)
    with pytest.raises(RunFailed, match="no engine is left"):
        publish(sink, weights, 9)
    said = participants.dropped["engine-0"]
    assert "engine-0: its rank 0 did not receive the weights as they were sent" in said
    assert "(digest sent" in said
    sink.close()
