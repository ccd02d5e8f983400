"""The call of the next bucket is posted while an engine takes the last one, and no further call."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from patient_loop import LOOP_TIME, run_patiently

from rlcore.errors import EngineFailed, RunFailed
from rlcore.weights import Bucket
from rollout.weight_sync.groups import link as links
from rollout.weight_sync.groups.assignment import Served
from rollout.weight_sync.groups.link import EngineLink, Link, RemoteLink
from rollout.weight_sync.links import DistributedTransport
from rollout.weight_sync.process_group import GroupAddress, WeightGroup, WorkThread

CPU = torch.device("cpu")
FLAT = torch.zeros(4, dtype=torch.uint8)
BUCKETS = [Bucket(index, ()) for index in range(4)]


@pytest.fixture(autouse=True)
def time_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "time", LOOP_TIME)


class Engine:
    """Answers a call when it is told to."""

    url = "http://127.0.0.1:1"
    group_ranks = 1

    def __init__(self, name: str = "engine-0", *, queues: bool = True) -> None:
        self.name = name
        self.queues_buckets = queues
        self.in_group: str | None = "weights"
        self.answers: dict[int, asyncio.Future[None]] = {}
        self.cancelled: list[int] = []

    async def receive_bucket(self, index: int, flat: None) -> None:
        self.answers[index] = asyncio.get_running_loop().create_future()
        try:
            await self.answers[index]
        except asyncio.CancelledError:
            self.cancelled.append(index)
            raise

    def fails(self, index: int) -> None:
        self.answers[index].set_exception(EngineFailed(f"{self.name} has no memory"))

    def took(self, index: int) -> None:
        self.answers[index].set_result(None)


class Group:
    """Has sent a bucket when it is told so."""

    def __init__(self) -> None:
        self.sent: list[Future[None]] = []
        self.closed = False

    def start_sending(self, flat: torch.Tensor) -> Future[None]:
        self.sent.append(Future())
        return self.sent[-1]

    def close(self) -> None:
        self.closed = True


def run(use: Callable[[], Any]) -> None:
    async def alone() -> None:
        before = asyncio.all_tasks()
        await use()
        assert asyncio.all_tasks() == before, "a call was left behind"

    run_patiently(asyncio.wait_for(alone(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def start(link: EngineLink, index: int) -> asyncio.Task[str | None]:
    indices = [one.index for one in BUCKETS[index : index + 2]]
    return asyncio.ensure_future(link.send(indices, None, FLAT))


def own_link(engine: Engine, timeout_s: float = 5.0) -> tuple[Link, Group]:
    link = Link(engine, "gloo", CPU, timeout_s)
    group = Group()
    link.group = group  # type: ignore[assignment]
    return link, group


def remote_link(engine: Any, timeout_s: float) -> RemoteLink:
    """The link of rank 1 with an engine."""
    return RemoteLink(engine, "gloo", Served(1), torch.device("cpu"), timeout_s)


def test_the_next_call_is_posted_while_the_bytes_leave() -> None:
    async def use() -> None:
        engine = Engine()
        link, group = own_link(engine)
        first = start(link, 0)
        await until(lambda: [*engine.answers] == [0, 1])
        assert link.last == 1
        await asyncio.sleep(0.01)
        assert not first.done(), "its memory is still read"
        group.sent[0].set_result(None)
        assert await first is None
        second = start(link, 1)
        await until(lambda: 2 in engine.answers)
        group.sent[1].set_result(None)
        await asyncio.sleep(0.01)
        assert not second.done(), "the engine has three calls"
        engine.took(0)
        assert await second is None
        third = start(link, 2)
        await until(lambda: 3 in engine.answers)
        group.sent[2].set_result(None)
        engine.took(1)
        assert await third is None
        last = start(link, 3)
        await until(lambda: len(group.sent) == 4)
        group.sent[3].set_result(None)
        assert await last is None
        settled = asyncio.ensure_future(link.settle())
        engine.took(2)
        await asyncio.sleep(0.01)
        assert not settled.done()
        engine.took(3)
        assert await settled is None

    run(use)


def test_each_publication_calls_anew() -> None:
    async def use() -> None:
        engine = Engine()
        link = remote_link(engine, 5.0)
        for _ in range(2):
            link.begin()
            assert link.last == -1
            engine.answers.clear()
            assert await start(link, 2) is None
            await until(lambda: [*engine.answers] == [2, 3])
            assert await start(link, 3) is None
            assert link.last == 3
            engine.took(2)
            engine.took(3)
            assert await link.settle() is None

    run(use)


def test_an_engine_that_queues_no_calls_has_one() -> None:
    async def use() -> None:
        engine = Engine(queues=False)
        link = remote_link(engine, 5.0)
        first = start(link, 0)
        await asyncio.sleep(0.01)
        assert not first.done()
        assert [*engine.answers] == [0]
        assert link.last == 0
        engine.took(0)
        assert await first is None

    run(use)


def test_an_engine_that_fails_while_the_next_call_is_posted_leaves_nothing() -> None:
    async def use() -> None:
        engine = Engine()
        link, group = own_link(engine)
        first = start(link, 0)
        await until(lambda: 1 in engine.answers)
        group.sent[0].set_result(None)
        await first
        second = start(link, 1)
        await until(lambda: 2 in engine.answers)
        engine.fails(0)
        assert await second == "engine-0 has no memory"
        assert engine.cancelled == [1, 2]
        assert group.closed
        assert link.group is None

    run(use)


@pytest.mark.parametrize("knows", [True, False])
def test_its_own_reason_comes_before_ours(knows: bool) -> None:
    async def use() -> None:
        engine = Engine()
        link, group = own_link(engine)
        sending = start(link, 0)
        await until(lambda: 0 in engine.answers)
        group.sent[0].set_exception(RunFailed("connection reset by peer"))
        await asyncio.sleep(0.01)
        assert not sending.done()
        engine.fails(0) if knows else engine.took(0)
        why = "engine-0 has no memory" if knows else "connection reset by peer"
        assert await sending == why
        assert group.closed

    run(use)


def test_the_time_of_a_call_begins_when_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank may be held up by another engine, which fails first."""
    monkeypatch.setattr(links, "ENGINE_GRACE_S", 0.0)

    async def use() -> None:
        engine = Engine()
        link = remote_link(engine, 0.3)
        await start(link, 2)
        second = start(link, 3)
        await asyncio.sleep(0.2)
        engine.took(2)
        assert await second is None
        await asyncio.sleep(0.4)
        began = LOOP_TIME.monotonic()
        late = r"engine engine-0 did not answer receive_bucket within 0.3 s"
        assert late in str(await link.settle())
        assert 0.2 < LOOP_TIME.monotonic() - began < 5
        assert engine.cancelled == [3]

    run(use)


def test_an_engine_that_hangs_is_late_though_our_bytes_hang_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "ENGINE_GRACE_S", 0.0)

    async def use() -> None:
        engine = Engine()
        link, group = own_link(engine, 0.2)
        assert "did not answer receive_bucket within 0.2 s" in str(await start(link, 0))
        assert group.closed

    run(use)


def transport_of(links: Sequence[EngineLink]) -> DistributedTransport:
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0)
    transport._links = {link.engine: link for link in links}
    transport._engines = [*transport._links]
    transport._buckets = BUCKETS
    return transport


def test_who_has_not_failed_is_brought_to_the_end_of_what_it_was_called_for() -> None:
    async def use() -> None:
        bad, good, own, stock = (
            Engine(n, queues=n != "stock") for n in ("bad", "good", "own", "stock")
        )
        link, group = own_link(own)
        others = [remote_link(one, 5.0) for one in (bad, good, stock)]
        transport = transport_of([*others, link])
        assert json.loads(transport.stop_order) == dict.fromkeys(
            ("bad", "good", "own", "stock"), -1
        )
        sending = asyncio.ensure_future(transport.send(BUCKETS[0], FLAT))
        await until(lambda: len(group.sent) == 1 and 0 in stock.answers)
        group.sent[0].set_result(None)
        stock.took(0)
        assert await sending == {}
        sending = asyncio.ensure_future(transport.send(BUCKETS[1], FLAT))
        await until(lambda: 2 in good.answers and 1 in stock.answers)
        for one in (good, own):
            one.took(0)
        stock.took(1)
        group.sent[1].set_result(None)
        bad.fails(0)
        assert await sending == {bad: "bad has no memory"}
        assert json.loads(transport.stop_order) == {"good": 2, "own": 2, "stock": 1}
        assert await transport.send_called(BUCKETS[1], FLAT) == {}
        assert len(group.sent) == 2, "it was sent already"
        called = asyncio.ensure_future(transport.send_called(BUCKETS[2], FLAT))
        await until(lambda: len(group.sent) == 3)
        await asyncio.sleep(0.01)
        assert not called.done(), "its memory is still read"
        group.sent[2].set_result(None)
        own.took(1)
        good.took(1)
        assert await called == {}
        assert await transport.send_called(BUCKETS[3], FLAT) == {}
        assert len(group.sent) == 3
        assert 3 not in good.answers
        over = asyncio.ensure_future(transport.give_up())
        await asyncio.sleep(0.01)
        assert not over.done()
        good.took(2)
        own.took(2)
        assert await over == {}

    run(use)


def test_who_fails_at_what_it_was_called_for_is_told() -> None:
    async def use() -> None:
        bad, own = Engine("bad"), Engine("own")
        link, group = own_link(own)
        transport = transport_of([remote_link(bad, 5.0), link])
        sending = asyncio.ensure_future(transport.send(BUCKETS[0], FLAT))
        await until(lambda: len(group.sent) == 1)
        group.sent[0].set_result(None)
        assert await sending == {}
        bad.fails(0)
        own.took(0)
        sending = asyncio.ensure_future(transport.send(BUCKETS[1], FLAT))
        await until(lambda: len(group.sent) == 2)
        group.sent[1].set_result(None)
        assert await sending == {bad: "bad has no memory"}
        called = asyncio.ensure_future(transport.send_called(BUCKETS[2], FLAT))
        await until(lambda: len(group.sent) == 3)
        own.fails(1)
        assert await called == {own: "own has no memory"}
        assert group.closed
        assert json.loads(transport.stop_order) == {}
        assert await transport.give_up() == {}

    run(use)


def test_a_failure_of_the_last_bucket_is_told_at_the_end() -> None:
    async def use() -> None:
        engine = Engine()
        transport = transport_of([remote_link(engine, 5.0)])
        assert await transport.send(BUCKETS[3], FLAT) == {}
        engine.fails(3)
        assert await transport.complete() == {engine: "engine-0 has no memory"}
        assert json.loads(transport.stop_order) == {}
        assert await transport.give_up() == {}

    run(use)


# --- the thread of a group ------------------------------------------------------------------------


def test_a_group_sends_in_one_thread_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def abort(self) -> None: ...

    done: list[tuple[int, int]] = []
    go_on = threading.Event()

    def send(group: WeightGroup, flat: torch.Tensor) -> None:
        assert go_on.wait(10)
        done.append((int(flat[0]), threading.get_ident()))

    monkeypatch.setattr("rollout.weight_sync.process_group.make_group", lambda *_: Backend())
    monkeypatch.setattr(WeightGroup, "send", send)
    address = GroupAddress("127.0.0.1", 1, 2, "gloo", 5.0)
    group = WeightGroup(address, 0, device=CPU, store=object())  # type: ignore[arg-type]
    sent = [group.start_sending(torch.full((1,), index)) for index in range(3)]
    before = {thread for thread in threading.enumerate() if thread.name == "weights"}
    go_on.set()
    for one in sent:
        one.result(10)
    assert [index for index, _ in done] == [0, 1, 2]
    assert len({thread for _, thread in done}) == 1
    group.close()
    with pytest.raises(RunFailed, match="the weight group is closed"):
        group.start_sending(FLAT)
    for thread in before:
        if thread.ident == done[0][1]:
            thread.join(10)
            assert not thread.is_alive()


def test_a_thread_does_what_it_was_given_before_it_was_closed() -> None:
    thread = WorkThread(CPU)
    hold = threading.Event()
    thread.start(lambda: hold.wait(10))
    last = thread.start(lambda: 7)
    thread.close()
    hold.set()
    assert last.result(10) == 7
