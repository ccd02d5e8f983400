"""Which rank serves an engine, as engines join, leave and die. No engine runs."""

from __future__ import annotations

import asyncio
from typing import Any

from links_kit import Engine

from rlcore.errors import EngineFailed
from rlcore.interfaces import RankAddress
from rollout.weight_sync.distributed import DistributedTransport
from rollout.weight_sync.sender import Order


def test_each_rank_is_ordered_to_serve_its_own_engines() -> None:
    engines = [Engine(f"engine-{i}") for i in range(3)]
    transport = DistributedTransport(timeout_s=5.0, probe_s=5.0, senders=2)
    transport.ranks = [RankAddress("a"), RankAddress("b")]
    transport._assignment.served = dict.fromkeys(engines, (1,))
    assert asyncio.run(transport.open(engines, ())) == {}
    orders = transport.orders()
    assert orders.joins
    own = orders.ranks[1]
    assert (own["digests"], own["known"]) == ([], [f"engine-{i}" for i in range(3)])
    assert own["engines"] == [
        {"engine": f"engine-{i}", "url": "http://10.0.0.9:30000", "ranks": 2, "backend": "gloo",
         "group": None, "trainer": (1,), "rank": 0}
        for i in range(3)
    ]  # fmt: skip
    assert orders.ranks[0]["engines"] == [], "rank 0 digests all the same"
    transport._assignment.served = dict.fromkeys(engines, (1, 0))
    transport._links = {}
    asyncio.run(transport.open(engines, ()))
    told = {
        rank: [Order(**one) for one in order["engines"]]
        for rank, order in transport.orders().ranks.items()
    }
    assert {rank: [one.rank for one in orders] for rank, orders in told.items()} == {
        0: [1, 1, 1],
        1: [0, 0, 0],
    }
    assert {len(one.trainer) + one.ranks for one in told[1]} == {4}


def test_the_backend_is_chosen_for_the_gpu_of_the_rank_that_serves() -> None:
    """NCCL makes no group of two ranks on one GPU."""

    class OnGPU(Engine):
        digests_weights = True

        async def health(self) -> dict[str, Any]:
            return {"gpu": "GPU-b"}

    engines = [OnGPU(f"engine-{i}") for i in range(3)]
    transport = DistributedTransport(timeout_s=5.0, probe_s=5.0, senders=3)
    transport.ranks = [RankAddress("a", f"GPU-{gpu}") for gpu in "abc"]
    transport._assignment.served = {engine: (1 + i % 2,) for i, engine in enumerate(engines)}
    asyncio.run(transport.open(engines, ()))
    assert [link.backend for link in transport._links.values()] == ["gloo", "nccl", "gloo"]
    kinds = [str(transport._links[engine].digest).partition(":")[0] for engine in engines]
    assert kinds == ["xxh3", "linear", "xxh3"], "GPUs compute only the second"


def test_an_engine_that_has_just_died_is_out_and_the_others_go_on() -> None:
    class Dead(Engine):
        """SGLang's has no address any more."""

        @property
        def url(self) -> str:
            raise EngineFailed("engine-0 (pid 7) died: killed by SIGKILL")

        @url.setter
        def url(self, url: str) -> None: ...

    for known in (False, True):
        dead = Dead()
        alive = Engine("engine-1")
        transport = DistributedTransport(timeout_s=5.0, probe_s=5.0, senders=2)
        transport.ranks = [RankAddress("a"), RankAddress("b")]
        transport._assignment.served = {alive: (1,)} | ({dead: (1,)} if known else {})
        failed = asyncio.run(transport.open([dead, alive], ()))
        why = "engine engine-0 cannot be reached: engine-0 (pid 7) died: killed by SIGKILL"
        assert failed == {dead: why}
        assert [one["engine"] for one in transport.orders().ranks[1]["engines"]] == ["engine-1"]


def test_an_engine_that_does_not_reach_its_rank_goes_to_rank_0() -> None:
    engine = Engine()
    transport = DistributedTransport(timeout_s=5.0, probe_s=5.0, senders=2)
    transport.ranks = [RankAddress("a"), RankAddress("b")]
    transport._assignment.served = {engine: (1,)}
    asyncio.run(transport.open([engine], ()))
    failed = asyncio.run(transport.join({1: {"engine-0": "no route to host"}}))
    assert list(failed) == [engine]
    assert transport._assignment.served == {engine: (0,)}
    assert transport._links == {}


def test_an_engine_that_joins_later_is_assigned_as_if_it_had_been_there() -> None:
    """It is alone in its first transaction, and rank 0 serves others already."""
    first = Engine("engine-0")
    late = Engine("late")
    transport = DistributedTransport(timeout_s=5.0, probe_s=5.0)
    transport.ranks = [RankAddress("a", "GPU-a"), RankAddress("b", "GPU-b")]
    transport._assignment.served = {first: (0,)}
    assert asyncio.run(transport.open([late], ())) == {}
    assert transport._assignment.served == {first: (0,), late: (1,)}


def test_the_ranks_of_an_engine_that_has_left_are_assigned_again() -> None:
    transport = DistributedTransport(timeout_s=5.0, probe_s=5.0)
    transport.ranks = [RankAddress("a", f"GPU-{gpu}") for gpu in "abcd"]
    stays = Engine("stays")
    for number in range(5):
        guest = Engine(f"guest-{number}")
        transport.has_all_engines = True
        asyncio.run(transport.open([stays, guest], ()))
        transport.has_all_engines = False
        asyncio.run(transport.open([guest], ()))
        assert list(transport._assignment.served) == [stays, guest]
        assert transport._assignment.served[guest][0] == 2


def test_the_group_of_an_engine_that_has_left_is_known_no_more() -> None:
    """So its ranks close it."""
    first, gone = Engine("engine-0"), Engine("gone")
    transport = DistributedTransport(timeout_s=5.0, probe_s=5.0)
    transport.ranks = [RankAddress("a")]
    for engine in (first, gone):
        engine.in_group = "weights"
    asyncio.run(transport.open([first, gone], ()))
    asyncio.run(transport.open([first], ()))
    assert transport.orders().ranks[0]["known"] == ["engine-0", "gone"]
    gone.in_group = None
    asyncio.run(transport.open([first], ()))
    assert transport.orders().ranks[0]["known"] == ["engine-0"]
