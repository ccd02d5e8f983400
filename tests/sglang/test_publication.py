"""Publications into a real server, in every mode, and when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from publication_kit import (
    PROMPT,
    TOLERANCE,
    Client,
    Oracle,
    check_contract,
    check_generation,
    check_update_during_responses,
    flatten,
    generate,
    layout,
    publish,
    random_weights,
    request,
    sink_over,
)
from server_kit import Served

from rlcore.errors import EngineFailed, PublicationFailed, RunFailed
from rlcore.interfaces import RankAddress
from rollout.engines.sglang.generation import Under
from rollout.weight_sync.distributed import DistributedTransport
from rollout.weight_sync.sender import GroupSender
from rollout.weight_sync.tensor import by_value
from tests.man_in_the_middle import ManInTheMiddle

LONG = list(range(1, 30)) * 3  # a prompt whose keys and values are worth caching
Clients = Callable[..., Client]


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_the_server_generates_with_what_was_published(
    served: Served, client: Clients, transport: str
) -> None:
    _, engine, sink, participants = client(transport=transport)
    for version, seed in ((5, 1), (6, 2)):
        weights = random_weights(served.model, seed)
        publish(sink, weights, version)
        check_generation(served, engine, weights, version)
    other = Oracle(served.model, random_weights(served.model, 1))
    assert other.errors(PROMPT, generate(served, engine)).max() > 0.1
    assert served.call(engine.health())["version"] == 6
    assert participants.dropped == {}


@pytest.mark.parametrize("mode", ["drain", "retract", "in_place", "abort"])
def test_an_update_while_responses_are_made(served: Served, client: Clients, mode: str) -> None:
    made = client(on_update=mode)
    used = len(LONG) + 2 * 50
    check_update_during_responses(served, made, mode, 10, LONG, responses=2, used=used)


def test_without_a_key_of_its_version_a_cached_prefix_would_be_stale(
    served: Served, client: Clients
) -> None:
    """What `in_place` does not flush is there, and wrong by nats: only the key keeps it from later
    requests.
    """
    _, engine, sink, _ = client(on_update="in_place")
    publish(sink, random_weights(served.model, 1), 10)
    generate(served, engine, prompt=LONG)
    publish(sink, random_weights(served.model, 2), 11)
    new = Oracle(served.model, random_weights(served.model, 2))
    generation = engine._generation
    assert generation is not None
    [stale] = served.call(generation.one(request(LONG), Under("10")))
    assert new.errors(LONG, stale).max() > 0.1
    assert new.errors(LONG, generate(served, engine, prompt=LONG)).max() < TOLERANCE


def test_a_part_of_an_update_is_nobodys_version(served: Served, client: Clients) -> None:
    engine = client().engine
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


def test_what_a_dead_trainer_left_behind_stops_nobody(served: Served, client: Clients) -> None:
    """It died during an update: the server is paused, an update open, and a group left over."""
    _, dead, sink, _ = client()
    weights = random_weights(served.model, 5)
    buckets = layout(weights)
    sink.prepare(buckets)
    sink.send(buckets[0], flatten(buckets[0], weights))
    served.call(dead.close())
    sink.close()  # as the end of its process does: the server waits for the second bucket

    _, engine, successor, _ = client()
    publish(successor, weights, 8)
    check_generation(served, engine, weights)


def test_a_bucket_that_fails_means_the_whole_transaction_again(
    served: Served, client: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two clients refuses a bucket: the other stays paused and takes the next attempt."""
    config, good, *_ = client(transport="tensor")
    bad = client(transport="tensor").engine

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
    check_generation(served, good, weights, 21)
    sink.close()


def test_calls_that_come_in_another_order_than_the_buckets_wait_for_their_turn(
    served: Served, client: Clients
) -> None:
    """The trainer posts a call before the last one was answered, over another connection."""
    engine = client(transport="distributed").engine
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
    check_generation(served, engine, weights)


def test_a_byte_that_is_changed_on_the_way_takes_the_engine_out(
    served: Served, client: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine, sink, participants = client(transport="distributed")
    man = ManInTheMiddle(None)
    man.stand_before(engine, monkeypatch)
    weights = random_weights(served.model, 8)
    publish(sink, weights, 8)
    assert man.seen == [flatten(bucket, weights).numpy().tobytes() for bucket in layout(weights)]
    man.flips = (2, 100)
    with pytest.raises(RunFailed, match="no engine is left"):
        publish(sink, weights, 9)
    said = participants.dropped["engine-0"]
    assert "engine-0: its rank 0 did not receive the weights as they were sent" in said
    assert "(digest sent" in said


def test_a_server_keeps_the_contract(served: Served, tmp_path: Path) -> None:
    check_contract(served, tmp_path)
