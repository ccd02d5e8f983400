"""Which rank serves an engine, and what rank 0 makes of what that rank tells. No engine runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.errors import EngineFailed
from rlcore.interfaces import RankPlace
from rollout.weight_sync import links
from rollout.weight_sync.groups.link import Order, RemoteLink
from rollout.weight_sync.groups.rank_sender import RankSender
from rollout.weight_sync.links import DistributedTransport, spread
from rollout.weight_sync.process_group import GroupAddress, WorkThread

CPU = torch.device("cpu")
ADDRESS = {
    "host": "10.0.0.2", "port": 4000, "world_size": 3, "backend": "gloo", "timeout_s": 5.0,
    "name": "weights-a",
}  # fmt: skip


class Engine:
    """Joins whatever it is told to."""

    def __init__(self, name: str = "engine-0", url: str = "http://10.0.0.9:30000") -> None:
        self.name = name
        self.url = url
        self.group_ranks = 2
        self.in_group: str | None = None
        self.joined: list[tuple[GroupAddress, int]] = []

    async def health(self) -> dict[str, Any]:
        return {"gpu": None}

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        self.joined.append((address, rank))
        self.in_group = address.name


@pytest.mark.parametrize(
    ("world", "count", "expected"),
    [
        (16, 1, [0]),
        (16, 2, [0, 8]),
        (16, 4, [0, 4, 8, 12]),
        (4, 64, [0, 1, 2, 3]),
        (6, 4, [0, 1, 3, 4]),
    ],
)
def test_senders_are_spread_over_the_ranks(world: int, count: int, expected: list[int]) -> None:
    assert spread(world, count) == expected


def ranks_of(engines: list[Engine], hosts: list[str], *, senders: int | None, device: str) -> Any:
    transport = DistributedTransport(
        device=torch.device(device), timeout_s=5.0, probe_s=5.0, senders=senders
    )
    transport.trainer_ranks = [RankPlace(host, None) for host in hosts]
    chosen = {}
    for engine in engines:
        chosen[engine] = transport._ranks[engine] = transport._choose_rank(engine, len(engines))
    return [chosen[engine] for engine in engines]


def test_engines_are_dealt_out_evenly() -> None:
    engines = [Engine(f"engine-{i}") for i in range(5)]
    two_nodes = ["a"] * 2 + ["b"] * 2
    assert ranks_of(engines, two_nodes, senders=2, device="cpu") == [0, 2, 0, 2, 0]
    assert ranks_of(engines, two_nodes, senders=None, device="cuda") == [0, 1, 2, 3, 0]
    assert ranks_of(engines, two_nodes, senders=None, device="cpu") == [0] * 5
    assert ranks_of(engines, [], senders=4, device="cuda") == [0] * 5  # one rank alone can send


def test_an_engine_on_loopback_is_served_from_rank_0s_machine() -> None:
    engines = [Engine(f"engine-{i}", "http://127.0.0.1:30000") for i in range(3)]
    assert ranks_of(engines, ["a", "a", "b", "b"], senders=4, device="cpu") == [0, 1, 0]


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
    got = asyncio.run(RemoteLink(engine, "gloo", 3, 5.0).meet(told))
    assert got is not None
    assert why in got
    assert engine.joined == []


def test_the_engine_enters_the_group_of_its_rank_behind_it() -> None:
    engine = Engine()
    link = RemoteLink(engine, "gloo", 3, 5.0)
    assert not link.is_whole
    assert asyncio.run(link.meet(json.dumps({"engine-0": ADDRESS}))) is None
    assert engine.joined == [(GroupAddress(**ADDRESS), 1)]  # type: ignore[arg-type]
    assert link.is_whole
    assert asyncio.run(link.meet(json.dumps({"engine-0": None}))) is None  # the last one is whole
    assert len(engine.joined) == 1


def group(send: Callable[[], Any], close: Callable[[], Any] = lambda: None) -> Any:
    """A group that does this."""
    thread = WorkThread(CPU)
    return SimpleNamespace(start_sending=lambda flat: thread.start(send), close=close)


def sender_to(**groups: Any) -> RankSender:
    sender = RankSender(CPU, 5.0)
    sender._groups = groups
    sender._served = [*groups]
    return sender


def stopped(**last: int) -> str:
    return json.dumps(last)


FLAT = torch.zeros(8, dtype=torch.uint8)
FOURTH: Any = SimpleNamespace(index=4)


def test_nothing_is_sent_once_rank_0_has_given_up() -> None:
    sent: list[str] = []
    sender = sender_to(a=group(lambda: sent.append("a")))
    sender.send(FOURTH, FLAT, lambda: stopped(a=3))
    assert sent == []
    sender.send(FOURTH, FLAT, lambda: None)
    assert sent == ["a"]


def test_an_engine_gets_the_bucket_for_which_it_was_called_though_rank_0_has_given_up() -> None:
    """It waits in a broadcast that nothing else ends. The one that failed gets nothing."""
    sent: list[str] = []
    sender = sender_to(
        failed=group(lambda: sent.append("failed")),
        called=group(lambda: sent.append("called")),
        waits=group(lambda: sent.append("waits")),
    )
    sender.send(FOURTH, FLAT, lambda: stopped(called=4, waits=3))
    assert sent == ["called"]


def test_who_fails_while_its_rank_sends_is_left_and_the_others_get_the_bucket() -> None:
    sent: list[str] = []
    hung = threading.Event()
    sender = sender_to(a=group(lambda: hung.wait(30), hung.set), b=group(lambda: sent.append("b")))
    answers = iter([None, stopped(b=4)])
    sender.send(FOURTH, FLAT, lambda: next(answers))
    assert sent == ["b"]
    assert hung.is_set()
    assert list(sender._groups) == ["b"]


def test_a_send_that_waits_ends_when_rank_0_gives_up() -> None:
    released = threading.Event()
    sender = sender_to(a=group(lambda: released.wait(30), released.set))
    answers = iter([None, None, stopped(a=3)])
    sender.send(FOURTH, FLAT, lambda: next(answers))
    assert released.is_set()
    assert sender._groups == {}


def test_a_group_that_fails_is_left_out_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[str] = []

    def fails() -> None:
        raise RuntimeError("connection reset by peer")

    sender = sender_to(a=group(fails), b=group(lambda: sent.append("b")))
    for index in range(2):
        bucket: Any = SimpleNamespace(index=index)
        sender.send(bucket, FLAT, lambda: None)
    assert sent == ["b", "b"]
    assert list(sender._groups) == ["b"]
    assert caplog.messages == [
        "engine a is not served any more: bucket 0 was not sent: connection reset by peer"
    ]


def test_each_rank_is_ordered_to_serve_its_own_engines() -> None:
    engines = [Engine(f"engine-{i}") for i in range(3)]
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0, senders=2)
    transport.trainer_ranks = [RankPlace("a", None), RankPlace("b", None)]
    transport._ranks = dict.fromkeys(engines, 1)
    assert asyncio.run(transport.open(engines, ())) == {}
    [(rank, order)] = transport.orders.items()
    assert rank == 1
    assert json.loads(order) == [
        {"engine": f"engine-{i}", "url": "http://10.0.0.9:30000", "ranks": 2, "backend": "gloo",
         "group": None}
        for i in range(3)
    ]  # fmt: skip
    assert Order(**json.loads(order)[0]).engine == "engine-0"


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
    transport._ranks = {engine: 1 + i % 2 for i, engine in enumerate(engines)}
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
        transport._ranks = {alive: 1} | ({dead: 1} if known else {})
        failed = asyncio.run(transport.open([dead, alive], ()))
        why = "engine engine-0 cannot be met: engine-0 (pid 7) died: killed by SIGKILL"
        assert failed == {dead: why}
        assert "engine-0" not in transport.orders[1]


def test_an_engine_that_does_not_reach_its_rank_goes_to_rank_0() -> None:
    engine = Engine()
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0, senders=2)
    transport.trainer_ranks = [RankPlace("a", None), RankPlace("b", None)]
    transport._ranks = {engine: 1}
    asyncio.run(transport.open([engine], ()))
    failed = asyncio.run(transport.meet({1: json.dumps({"engine-0": "no route to host"})}))
    assert list(failed) == [engine]
    assert transport._ranks == {engine: 0}
    assert transport._links == {}


def test_what_was_not_finished_leaves_no_group() -> None:
    """NCCL completes a small broadcast that no engine receives: the next would be off by one."""
    closed: list[str] = []
    sender = RankSender(CPU, 5.0)
    for name in ("engine-0", "engine-1"):
        sender._groups[name] = SimpleNamespace(  # type: ignore[assignment]
            close=lambda name=name: closed.append(name)
        )
    sender._served = ["engine-1"]
    sender.abandon()
    assert closed == ["engine-1"]
    assert list(sender._groups) == ["engine-0"]


def test_an_engine_that_joins_later_is_dealt_as_if_it_had_been_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is alone in its first transaction, and rank 0 serves others already."""
    monkeypatch.setattr(links, "gpu_identity", lambda device: "GPU-a")
    first = Engine("engine-0")
    late = Engine("late")
    transport = DistributedTransport(device=torch.device("cuda"), timeout_s=5.0, probe_s=5.0)
    transport.trainer_ranks = [RankPlace("a", "GPU-a"), RankPlace("b", "GPU-b")]
    transport._ranks = {first: 0}
    assert asyncio.run(transport.open([late], ())) == {}
    assert transport._ranks == {first: 0, late: 1}


def test_the_group_of_an_engine_that_has_left_is_closed() -> None:
    first = Engine("engine-0")
    gone = Engine("gone")
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0, senders=2)
    transport.trainer_ranks = [RankPlace("a", None), RankPlace("b", None)]
    transport._ranks = {first: 1, gone: 0}
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
