"""The call of the next bucket is posted while an engine takes the last one, and no further call."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rlcore.errors import EngineFailed, RunFailed
from rlcore.weights import Bucket
from rollout.weight_sync.groups import link as links
from rollout.weight_sync.groups.link import EngineLink, Link, RemoteLink
from rollout.weight_sync.links import DistributedTransport
from rollout.weight_sync.process_group import GroupAddress, WeightGroup, WorkThread

CPU = torch.device("cpu")
FLAT = torch.zeros(4, dtype=torch.uint8)
BUCKETS = [Bucket(index, ()) for index in range(4)]


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

    asyncio.run(asyncio.wait_for(alone(), 20))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def start(link: EngineLink, index: int) -> asyncio.Task[str | None]:
    return asyncio.ensure_future(link.send(BUCKETS[index], FLAT))


def own_link(engine: Engine, timeout_s: float = 5.0) -> tuple[Link, Group]:
    link = Link(engine, "gloo", CPU, timeout_s)
    group = Group()
    link.group = group  # type: ignore[assignment]
    return link, group


def test_the_next_call_is_posted_when_the_bytes_have_left() -> None:
    async def use() -> None:
        engine = Engine()
        link, group = own_link(engine)
        first = start(link, 0)
        await asyncio.sleep(0.01)
        assert not first.done(), "its memory is still read"
        group.sent[0].set_result(None)
        assert await first is None
        second = start(link, 1)
        await until(lambda: 1 in engine.answers)
        group.sent[1].set_result(None)
        await asyncio.sleep(0.01)
        assert not second.done(), "the engine has two calls"
        engine.took(0)
        assert await second is None
        settled = asyncio.ensure_future(link.settle())
        await asyncio.sleep(0.01)
        assert not settled.done()
        engine.took(1)
        assert await settled is None

    run(use)


def test_an_engine_that_queues_no_calls_has_one() -> None:
    async def use() -> None:
        engine = Engine(queues=False)
        link = RemoteLink(engine, "gloo", 1, 5.0)
        first = start(link, 0)
        await asyncio.sleep(0.01)
        assert not first.done()
        engine.took(0)
        assert await first is None

    run(use)


def test_an_engine_that_fails_while_the_next_call_is_posted_leaves_nothing() -> None:
    async def use() -> None:
        engine = Engine()
        link, group = own_link(engine)
        first = start(link, 0)
        await until(lambda: 0 in engine.answers)
        group.sent[0].set_result(None)
        await first
        second = start(link, 1)
        await until(lambda: 1 in engine.answers)
        engine.fails(0)
        assert await second == "engine-0 has no memory"
        assert engine.cancelled == [1]
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
        link = RemoteLink(engine, "gloo", 1, 0.3)
        await start(link, 0)
        second = start(link, 1)
        await asyncio.sleep(0.2)
        engine.took(0)
        assert await second is None
        await asyncio.sleep(0.4)
        began = time.monotonic()
        late = r"engine engine-0 did not answer receive_bucket within 0.3 s"
        assert late in str(await link.settle())
        assert 0.2 < time.monotonic() - began < 5
        assert engine.cancelled == [1]

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


def test_who_has_not_failed_is_brought_to_the_end_of_what_it_was_called_for() -> None:
    async def use() -> None:
        bad, good = Engine("bad"), Engine("good")
        transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0)
        transport._engines = [bad, good]
        transport._links = {one: RemoteLink(one, "gloo", 1, 5.0) for one in (bad, good)}
        assert json.loads(transport.stop_order) == {"last": -1, "out": []}
        assert await transport.send(BUCKETS[0], FLAT) == {}
        sending = asyncio.ensure_future(transport.send(BUCKETS[1], FLAT))
        await until(lambda: 1 in good.answers)
        good.took(0)
        bad.fails(0)
        assert await sending == {bad: "bad has no memory"}
        assert json.loads(transport.stop_order) == {"last": 1, "out": ["bad"]}
        over = asyncio.ensure_future(transport.give_up())
        await asyncio.sleep(0.01)
        assert not over.done()
        good.took(1)
        assert await over == {}

    run(use)


def test_a_failure_of_the_last_bucket_is_told_at_the_end() -> None:
    async def use() -> None:
        engine = Engine()
        transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0)
        transport._engines = [engine]
        transport._links = {engine: RemoteLink(engine, "gloo", 1, 5.0)}
        assert await transport.send(BUCKETS[0], FLAT) == {}
        engine.fails(0)
        assert await transport.complete() == {engine: "engine-0 has no memory"}
        assert json.loads(transport.stop_order)["out"] == ["engine-0"]
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
