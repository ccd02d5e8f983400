"""Ranks that pass buckets on to an engine, in the order in which CUDA's streams would run them.

A broadcast of NCCL runs on a stream of its own, behind what the caller's stream was given before.
So a rank that is ahead of the one that sends may have the trainer's next broadcast in front of what
it passes on, while the sender waits for that before it joins the trainer's. Gloo knows no streams.

Real are the order of buckets (`prefetched`), the threads of a weight group, the ranks
(`GroupSender`) and the calls of the engine (`EngineLink`). Streams and broadcasts are threads that
wait for each other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.megatron.weights import prefetch
from rollout.weight_sync.distributed import EngineLink
from rollout.weight_sync.process_group import GroupAddress, WeightGroup
from rollout.weight_sync.sender import GroupSender, Order

BUCKETS = 8
FLAT = torch.zeros(1, dtype=torch.uint8)
CPU = torch.device("cpu")
COMES_TOGETHER_S = 0.05  # a communicator
LIMIT_S = 60.0
HANGS_S = 2.0  # until a test takes a publication to hang


class Stream:
    """Runs what it is given, one after the other."""

    def __init__(self, device: Any = None) -> None:
        self.queue: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.queue.get()()

    def record_event(self) -> threading.Event:
        event = threading.Event()
        self.queue.put(event.set)
        return event

    def wait_event(self, event: threading.Event) -> None:
        self.queue.put(event.wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Meeting:
    """A collective: it ends where all of its ranks have begun it."""

    def __init__(self, ranks: int) -> None:
        self._missing = ranks
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self._missing -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._missing <= 0)

    def end(self) -> None:
        """Let go whoever waits."""
        with self._changed:
            self._missing = 0
            self._changed.notify_all()


class Ahead(GroupSender):
    """A rank that helps, and does not wait for what it passes on."""

    def send(self, bucket: Any, flat: torch.Tensor, stopped: Any) -> None:
        if self._orders[0].rank:
            self._start(self._orders[0], bucket, flat)
        else:
            super().send(bucket, flat, stopped)


class Publication:
    """Ranks of a trainer, of which some are in the group of one engine.

    Args:
        members: the ranks in that group, the one that sends first.
        sender: of the ranks.
    """

    def __init__(
        self, world: int, members: tuple[int, ...], sender: type[GroupSender] = GroupSender
    ) -> None:
        self.members = members
        self.sender = sender
        self.default = [Stream() for _ in range(world)]
        self.local = threading.local()
        self.trainers = [Meeting(world) for _ in range(BUCKETS)]
        self.engines = [Meeting(len(members) + 1) for _ in range(BUCKETS)]
        self.communicator = Meeting(len(members) + 1)
        self.told = [threading.Event() for _ in range(BUCKETS)]
        self.called = [threading.Event() for _ in range(BUCKETS)]
        self.received = [threading.Event() for _ in range(BUCKETS)]
        self.name = "engine"
        self.queues_buckets = True
        self.threads = [
            threading.Thread(target=self.rank, args=(rank,), daemon=True) for rank in range(world)
        ]
        self.threads.append(threading.Thread(target=self.engine, daemon=True))

    def run(self, seconds: float) -> bool:
        """Whether all ranks come to the end in time."""
        for thread in self.threads:
            thread.start()
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def end(self) -> None:
        """Let everybody go who waits for another one."""
        for meeting in (*self.trainers, *self.engines, self.communicator):
            meeting.end()
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()

    # --- the engine -------------------------------------------------------------------------------

    def engine(self) -> None:
        self.called[0].wait()
        time.sleep(COMES_TOGETHER_S)
        self.communicator()
        for index in range(BUCKETS):
            self.called[index].wait()
            self.engines[index]()
            self.received[index].set()

    async def receive_bucket(self, index: int, flat: None) -> None:
        self.called[index].set()
        await asyncio.to_thread(self.received[index].wait)

    # --- the ranks --------------------------------------------------------------------------------

    def rank(self, rank: int) -> None:
        device: Any = SimpleNamespace(type="cuda", index=rank)
        serve = self.rank_0() if rank == 0 else self.sending_rank(rank)

        def make(index: int) -> int:
            if rank and index:
                self.told[index - 1].wait()  # rank 0 says when a bucket's broadcast begins
            self.current(device).queue.put(self.trainers[index])
            if rank == 0:
                self.told[index].set()
            return index

        for index in prefetch.prefetched(make, range(BUCKETS), device):
            serve(index)

    def rank_0(self) -> Callable[[int], None]:
        """What rank 0 does: it has the engine called, and sends as every rank."""
        link = EngineLink(self, "gloo", self.members, LIMIT_S)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        send = self.sending_rank(0)

        def serve(index: int) -> None:
            indices = range(index, min(index + 2, BUCKETS))
            call = asyncio.run_coroutine_threadsafe(link.send(indices), loop)
            send(index)
            self.default[0].record_event().wait()  # rank 0 computes the bucket's digest
            assert call.result() is None
            if index == BUCKETS - 1:
                drained = asyncio.run_coroutine_threadsafe(link.drain(), loop)
                assert drained.result() is None

        return serve

    def sending_rank(self, rank: int) -> Callable[[int], None]:
        if rank not in self.members:
            return lambda index: None
        place = self.members.index(rank)
        sender = self.sender(CPU, LIMIT_S)
        sender._groups = {"engine": Group(self, rank)}
        sender._orders = [
            Order("engine", "http://10.0.0.9:1", 1, "gloo", None, self.members, place)
        ]
        return lambda index: sender.send(
            SimpleNamespace(index=index),  # type: ignore[arg-type]
            FLAT,
            lambda: None,
        )

    def current(self, device: Any) -> Stream:
        return getattr(self.local, "stream", None) or self.default[device.index]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = None


class Group(WeightGroup):
    """A weight group whose broadcasts are as NCCL's."""

    def __init__(self, publication: Publication, rank: int) -> None:
        self.publication = publication
        self.address = GroupAddress("here", 1, 2, "gloo", LIMIT_S)
        self.rank = publication.members.index(rank)
        self.device = SimpleNamespace(type="cuda", index=rank)  # type: ignore[assignment]
        self._group = object()
        self._sending = None
        self._nccl = Stream()
        self._next = 0

    def _broadcast(self, flat: torch.Tensor) -> None:
        if self._next == 0:
            self.publication.communicator()
        # as torch's ProcessGroupNCCL: behind what the caller's stream has at this moment
        self._nccl.wait_event(self.publication.default[self.device.index].record_event())
        self._nccl.queue.put(self.publication.engines[self._next])
        self._next += 1
        self._nccl.record_event().wait()

    def close(self) -> None: ...


def publication(
    monkeypatch: pytest.MonkeyPatch, world: int, members: tuple[int, ...], **given: Any
) -> Publication:
    made = Publication(world, members, **given)
    cuda = SimpleNamespace(Stream=Stream, current_stream=made.current, stream=made.on)
    stand_in = SimpleNamespace(no_grad=torch.no_grad, cuda=cuda, device=torch.device)
    monkeypatch.setattr(prefetch, "torch", stand_in)
    return made


@pytest.mark.parametrize(
    ("world", "members"),
    [(3, (1,)), (3, (1, 2)), (2, (1, 0)), (3, (1, 2, 0)), (8, (1, 2, 3, 0)), (8, (4, 5, 6, 7))],
)
def test_ranks_that_help_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, world: int, members: tuple[int, ...]
) -> None:
    assert publication(monkeypatch, world, members).run(LIMIT_S)


def test_one_that_does_not_wait_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """So this shows what it is for."""
    made = publication(monkeypatch, 3, (1, 2), sender=Ahead)
    assert not made.run(HANGS_S)
    made.end()
