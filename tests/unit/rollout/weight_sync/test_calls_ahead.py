"""The call of the next bucket is posted while an engine takes the last one, and no further call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patient_loop import LOOP_TIME, run_patiently

from rlcore.errors import EngineFailed, RunFailed
from rlcore.weights import Bucket
from rollout.weight_sync import distributed
from rollout.weight_sync.distributed import DistributedTransport, EngineLink
from rollout.weight_sync.process_group import GroupAddress, WeightGroup, WorkThread

CPU = torch.device("cpu")
FLAT = torch.zeros(4, dtype=torch.uint8)
BUCKETS = [Bucket(index, ()) for index in range(4)]


@pytest.fixture(autouse=True)
def time_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "time", LOOP_TIME)


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
    return asyncio.ensure_future(link.send(indices))


def link_to(engine: Any, timeout_s: float = 5.0) -> EngineLink:
    return EngineLink(engine, "gloo", (1,), timeout_s)


def test_the_next_call_is_posted_while_the_bytes_leave() -> None:
    async def use() -> None:
        engine = Engine()
        link = link_to(engine)
        assert await start(link, 0) is None
        await until(lambda: [*engine.answers] == [0, 1])
        assert link.last == 1
        second = start(link, 1)
        await until(lambda: 2 in engine.answers)
        await asyncio.sleep(0.01)
        assert not second.done(), "the engine has three calls"
        engine.took(0)
        assert await second is None
        third = start(link, 2)
        await until(lambda: 3 in engine.answers)
        engine.took(1)
        assert await third is None
        assert await start(link, 3) is None
        drained = asyncio.ensure_future(link.drain())
        engine.took(2)
        await asyncio.sleep(0.01)
        assert not drained.done()
        engine.took(3)
        assert await drained is None

    run(use)


def test_each_publication_calls_again() -> None:
    async def use() -> None:
        engine = Engine()
        link = link_to(engine)
        for _ in range(2):
            link.begin({})
            assert link.last == -1
            engine.answers.clear()
            assert await start(link, 2) is None
            await until(lambda: [*engine.answers] == [2, 3])
            assert await start(link, 3) is None
            assert link.last == 3
            engine.took(2)
            engine.took(3)
            assert await link.drain() is None

    run(use)


def test_an_engine_that_queues_no_calls_has_one() -> None:
    async def use() -> None:
        engine = Engine(queues=False)
        link = link_to(engine)
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
        link = link_to(engine)
        await start(link, 0)
        await until(lambda: 1 in engine.answers)
        second = start(link, 1)
        await until(lambda: 2 in engine.answers)
        engine.fails(0)
        assert await second == "engine-0 has no memory"
        assert engine.cancelled == [1, 2]

    run(use)


def test_the_time_of_a_call_begins_when_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank may be held up by another engine, which fails first."""
    monkeypatch.setattr(distributed, "ENGINE_GRACE_S", 0.0)

    async def use() -> None:
        engine = Engine()
        link = link_to(engine, 0.3)
        await start(link, 2)
        await until(lambda: 3 in engine.answers)
        await asyncio.sleep(0.2)
        engine.took(2)
        assert await start(link, 3) is None
        await asyncio.sleep(0.4)
        began = LOOP_TIME.monotonic()
        late = r"engine engine-0 did not answer receive_bucket within 0.3 s"
        assert late in str(await link.drain())
        assert 0.2 < LOOP_TIME.monotonic() - began < 5
        assert engine.cancelled == [3]

    run(use)


def transport_of(*engines: Engine) -> DistributedTransport:
    transport = DistributedTransport(timeout_s=5.0, probe_s=5.0)
    transport._links = {engine: link_to(engine) for engine in engines}
    transport._engines = [*engines]
    transport._buckets = BUCKETS
    return transport


def test_who_has_not_failed_is_brought_to_the_end_of_what_it_was_called_for() -> None:
    async def use() -> None:
        bad, good, stock = (
            Engine(name, queues=name != "stock") for name in ("bad", "good", "stock")
        )
        transport = transport_of(bad, good, stock)
        assert transport.stop() == dict.fromkeys(("bad", "good", "stock"), -1)
        sending = asyncio.ensure_future(transport.send(0, {}))
        await until(lambda: 0 in stock.answers)
        stock.took(0)
        assert await sending == {}
        sending = asyncio.ensure_future(transport.send(1, {}))
        await until(lambda: 2 in good.answers and 1 in stock.answers)
        good.took(0)
        stock.took(1)
        bad.fails(0)
        assert await sending == {bad: "bad has no memory"}
        assert transport.stop() == {"good": 2, "stock": 1}
        over = asyncio.ensure_future(transport.give_up())
        good.took(1)
        await asyncio.sleep(0.01)
        assert not over.done()
        assert 3 not in good.answers
        good.took(2)
        assert await over == {}

    run(use)


def test_who_fails_at_what_it_was_called_for_is_told() -> None:
    async def use() -> None:
        bad, good = Engine("bad"), Engine("good")
        transport = transport_of(bad, good)
        assert await transport.send(0, {}) == {}
        await until(lambda: 1 in good.answers)
        bad.fails(0)
        good.took(0)
        assert await transport.send(1, {}) == {bad: "bad has no memory"}
        await until(lambda: 2 in good.answers)
        good.fails(1)
        assert await transport.give_up() == {good: "good has no memory"}
        assert transport.stop() == {}

    run(use)


def test_a_failure_of_the_last_bucket_is_told_at_the_end() -> None:
    async def use() -> None:
        engine = Engine()
        transport = transport_of(engine)
        assert await transport.send(3, {}) == {}
        await until(lambda: 3 in engine.answers)
        engine.fails(3)
        assert await transport.complete({}) == {engine: "engine-0 has no memory"}
        assert transport.stop() == {}
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
