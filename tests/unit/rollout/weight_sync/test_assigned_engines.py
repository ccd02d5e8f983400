"""Which rank serves an engine, as engines join, leave and die. No engine runs."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from links_kit import ADDRESS, CPU, Engine, Group, order_for

from rlcore.errors import EngineFailed
from rlcore.interfaces import RankPlace
from rollout.weight_sync import links
from rollout.weight_sync.groups.assignment import Served
from rollout.weight_sync.groups.link import Order
from rollout.weight_sync.groups.rank_sender import RankSender
from rollout.weight_sync.links import DistributedTransport
from rollout.weight_sync.process_group import GroupAddress


def test_each_rank_is_ordered_to_serve_its_own_engines() -> None:
    engines = [Engine(f"engine-{i}") for i in range(3)]
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0, senders=2)
    transport.trainer_ranks = [RankPlace("a", None), RankPlace("b", None)]
    transport._assignment.served = dict.fromkeys(engines, Served(1))
    assert asyncio.run(transport.open(engines, ())) == {}
    [(rank, order)] = transport.orders.items()
    assert rank == 1
    assert json.loads(order) == [
        {"engine": f"engine-{i}", "url": "http://10.0.0.9:30000", "ranks": 2, "backend": "gloo",
         "group": None, "trainer": [1], "rank": 0}
        for i in range(3)
    ]  # fmt: skip
    assert Order(**json.loads(order)[0]).engine == "engine-0"
    transport._assignment.served = dict.fromkeys(engines, Served(1, (0,)))
    transport._links = {}
    asyncio.run(transport.open(engines, ()))
    told = {
        rank: [Order(**one) for one in json.loads(said)] for rank, said in transport.orders.items()
    }
    assert {rank: [one.rank for one in orders] for rank, orders in told.items()} == {1: [0, 0, 0]}
    assert {one.others for one in told[1]} == {3}, "rank 0 and the engine's two"


def test_the_backend_is_chosen_for_the_gpu_of_the_rank_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL makes no group of two ranks on one GPU."""
    monkeypatch.setattr(links, "gpu_identity", lambda device: "GPU-a")

    class OnGPU(Engine):
        async def health(self) -> dict[str, Any]:
            return {"gpu": "GPU-b"}

    engines = [OnGPU(f"engine-{i}") for i in range(3)]
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0, senders=3)
    transport.trainer_ranks = [RankPlace("a", f"GPU-{gpu}") for gpu in "abc"]
    transport._assignment.served = {engine: Served(1 + i % 2) for i, engine in enumerate(engines)}
    asyncio.run(transport.open(engines, ()))
    assert [link.backend for link in transport._links.values()] == ["gloo", "nccl", "gloo"]


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
        transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0, senders=2)
        transport.trainer_ranks = [RankPlace("a", None), RankPlace("b", None)]
        transport._assignment.served = {alive: Served(1)} | ({dead: Served(1)} if known else {})
        failed = asyncio.run(transport.open([dead, alive], ()))
        why = "engine engine-0 cannot be met: engine-0 (pid 7) died: killed by SIGKILL"
        assert failed == {dead: why}
        assert "engine-0" not in transport.orders[1]


def test_an_engine_that_does_not_reach_its_rank_goes_to_rank_0() -> None:
    engine = Engine()
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0, senders=2)
    transport.trainer_ranks = [RankPlace("a", None), RankPlace("b", None)]
    transport._assignment.served = {engine: Served(1)}
    asyncio.run(transport.open([engine], ()))
    own = Group(GroupAddress(**ADDRESS), 1)  # type: ignore[arg-type]
    transport._links[engine].group = own  # type: ignore[assignment]
    failed = asyncio.run(transport.meet({1: json.dumps({"engine-0": "no route to host"})}))
    assert list(failed) == [engine]
    assert not own.is_open
    assert transport._assignment.served == {engine: Served(0)}
    assert transport._links == {}


def test_what_was_not_finished_leaves_no_group() -> None:
    """NCCL completes a small broadcast that no engine receives: the next would be off by one."""
    closed: list[str] = []
    sender = RankSender(CPU, 5.0)
    for name in ("engine-0", "engine-1"):
        sender._groups[name] = SimpleNamespace(  # type: ignore[assignment]
            close=lambda name=name: closed.append(name)
        )
    sender._orders = [order_for("engine-1")]
    meeting: Future[Any] = Future()
    sender._meetings = {"engine-2": meeting}
    sender.abandon()
    assert closed == ["engine-1"]
    assert list(sender._groups) == ["engine-0"]
    meeting.set_result(SimpleNamespace(close=lambda: closed.append("engine-2")))
    assert closed == ["engine-1", "engine-2"], "one that comes together late"


def test_an_engine_that_joins_later_is_assigned_as_if_it_had_been_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is alone in its first transaction, and rank 0 serves others already."""
    monkeypatch.setattr(links, "gpu_identity", lambda device: "GPU-a")
    first = Engine("engine-0")
    late = Engine("late")
    transport = DistributedTransport(device=torch.device("cuda"), timeout_s=5.0, probe_s=5.0)
    transport.trainer_ranks = [RankPlace("a", "GPU-a"), RankPlace("b", "GPU-b")]
    transport._assignment.served = {first: Served(0)}
    assert asyncio.run(transport.open([late], ())) == {}
    assert transport._assignment.served == {first: Served(0), late: Served(1)}


def test_the_ranks_of_an_engine_that_has_left_are_assigned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def joined(_: links.Link) -> None: ...

    monkeypatch.setattr(links.Link, "join", joined)
    monkeypatch.setattr(links, "gpu_identity", lambda device: "GPU-a")
    transport = DistributedTransport(device=torch.device("cuda"), timeout_s=5.0, probe_s=5.0)
    transport.trainer_ranks = [RankPlace("a", f"GPU-{gpu}") for gpu in "abcd"]
    stays = Engine("stays")
    for number in range(5):
        guest = Engine(f"guest-{number}")
        transport.has_all_engines = True
        asyncio.run(transport.open([stays, guest], ()))
        transport.has_all_engines = False
        asyncio.run(transport.open([guest], ()))
        assert list(transport._assignment.served) == [stays, guest]
        assert transport._assignment.served[guest].sender == 2


def test_the_group_of_an_engine_that_has_left_is_closed() -> None:
    first = Engine("engine-0")
    gone = Engine("gone")
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0, senders=2)
    transport.trainer_ranks = [RankPlace("a", None), RankPlace("b", None)]
    transport._assignment.served = {first: Served(1), gone: Served(0)}
    closed = []
    group = SimpleNamespace(
        is_open=True,
        address=SimpleNamespace(name="weights-b"),
        close=lambda: closed.append("gone"),
    )
    link = links.Link(gone, "gloo", CPU, 5.0)
    link.group = group  # type: ignore[assignment]
    transport._links = {gone: link}
    gone.in_group = "weights-b"
    asyncio.run(transport.open([first], ()))
    assert closed == []
    gone.in_group = None
    asyncio.run(transport.open([first], ()))
    assert closed == ["gone"]
    assert gone not in transport._links
