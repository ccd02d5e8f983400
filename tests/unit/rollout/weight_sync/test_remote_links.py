"""What rank 0 makes of what the rank that serves an engine tells. No engine runs."""

from __future__ import annotations

import asyncio
import json

import pytest
from links_kit import ADDRESS, CPU, FLAT, Engine, Group

from rlcore.errors import RunFailed
from rollout.weight_sync.groups import link as link_module
from rollout.weight_sync.groups.assignment import Served
from rollout.weight_sync.groups.link import RemoteLink
from rollout.weight_sync.process_group import GroupAddress


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (json.dumps({"engine-0": "no route to host"}), "cannot be met by rank 3: no route to host"),
        (json.dumps({"engine-1": ADDRESS}), "rank 3 told no place for engine engine-0"),
        (
            json.dumps({"engine-0": {"host": "10.0.0.2"}}),
            "rank 3 told no place for engine engine-0",
        ),
        (json.dumps([1]), "rank 3 told no place for engine engine-0: '[1]'"),
        ("", "rank 3 told no place for engine engine-0: ''"),
    ],
)
def test_what_is_no_place_takes_the_engine_out(told: str, why: str) -> None:
    engine = Engine()
    got = asyncio.run(RemoteLink(engine, "gloo", Served(3), CPU, 60.0).meet({3: told}))
    assert got is not None
    assert why in got
    assert engine.joined == []


def test_the_engine_enters_the_group_of_its_rank_behind_it() -> None:
    engine = Engine()
    link = RemoteLink(engine, "gloo", Served(3), CPU, 60.0)
    assert not link.is_whole
    assert asyncio.run(link.meet({3: json.dumps({"engine-0": ADDRESS})})) is None
    assert engine.joined == [(GroupAddress(**ADDRESS), 1)]  # type: ignore[arg-type]
    assert link.is_whole
    whole = json.dumps({"engine-0": None})  # the last one
    assert asyncio.run(link.meet({3: whole})) is None
    assert len(engine.joined) == 1


def test_the_engine_comes_behind_the_ranks_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 enters the group as one of them."""
    monkeypatch.setattr(link_module, "WeightGroup", Group)
    monkeypatch.setattr(Group, "made", [])
    engine = Engine()
    link = RemoteLink(engine, "gloo", Served(3, (4, 0)), CPU, 60.0)
    place = json.dumps({"engine-0": ADDRESS})
    none_yet = json.dumps({"engine-0": "it has no group"})
    assert asyncio.run(link.meet({3: place, 4: none_yet})) is None
    assert engine.joined == [(GroupAddress(**ADDRESS), 3)]  # type: ignore[arg-type]
    [own] = Group.made
    assert (own.address, own.rank) == (GroupAddress(**ADDRESS), 2)  # type: ignore[arg-type]
    whole = json.dumps({"engine-0": None})
    assert asyncio.run(link.meet({3: whole, 4: whole})) is None
    left = asyncio.run(link.meet({3: whole, 4: none_yet}))
    assert left == "engine engine-0 is in a group that rank 4 has left"
    own.is_open = False
    left = asyncio.run(link.meet({3: whole, 4: whole}))
    assert left == "engine engine-0 is in a group that rank 0 has left"
    assert len(engine.joined) == 1
    own.is_open = True
    assert asyncio.run(link.meet({3: place, 4: none_yet})) is None
    assert not own.is_open, "the old group is closed"
    assert len(Group.made) == 2


class Queueing(Engine):
    """Takes buckets, and answers no call."""

    queues_buckets = True

    async def receive_bucket(self, index: int, flat: None) -> None:
        await asyncio.Event().wait()


def test_rank_0_goes_on_when_it_has_passed_a_bucket_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of the sender, it would queue a broadcast of the trainer before this one."""
    monkeypatch.setattr(link_module, "WeightGroup", Group)
    monkeypatch.setattr(Group, "made", [])

    async def scenario() -> str | None:
        engine = Queueing()
        link = RemoteLink(engine, "gloo", Served(3, (0,)), CPU, 60.0)
        assert await link.meet({3: json.dumps({"engine-0": ADDRESS})}) is None
        link.begin()
        sending = asyncio.ensure_future(link.send([0, 1], None, FLAT))
        await asyncio.sleep(0.05)
        assert not sending.done(), "two calls may be unanswered, but the bucket has not left"
        Group.made[0].passed_on[0].set_result(None)
        assert await asyncio.wait_for(sending, 60) is None
        await link._calls.drop()
        sending = asyncio.ensure_future(link.send_called(FLAT))
        await asyncio.sleep(0)
        Group.made[0].passed_on[1].set_exception(RunFailed("connection reset"))
        why = await asyncio.wait_for(sending, 60)
        assert link.group is None
        return why

    assert asyncio.run(scenario()) == "connection reset"
