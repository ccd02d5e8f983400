"""A publication to engines as the streams of CUDA would run it: ranks and engines are threads.

A broadcast of NCCL runs on a stream of its own, behind what the caller's stream was given before.
So a rank that is ahead of the one that sends may have the trainer's next broadcast in front of what
it passes on, while the sender waits for that before it joins the trainer's. Gloo knows no streams.

Real are the order of buckets (`prefetched`), the threads of a weight group, the ranks
(`GroupSender`), the calls of the engines (`EngineLink`), and what a rank enqueues for a bucket,
where it was recorded (recording.py). Devices, streams and collectives are those of streams.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from backends.megatron.weights import prefetch
from rollout.weight_sync import process_group
from rollout.weight_sync.distributed import EngineLink
from rollout.weight_sync.process_group import GroupAddress, WeightGroup
from rollout.weight_sync.sender import GroupSender, Order
from tests.nccl_rules.recording import Op, RankOrder
from tests.nccl_rules.streams import Device, Meeting, Queues, Stream

CPU = torch.device("cpu")
COMES_TOGETHER_S = 0.05  # a communicator
LIMIT_S = 60.0
HANGS_S = 2.0  # until a test takes a publication to hang

K = TypeVar("K")
V = TypeVar("V")
Prefetched = Callable[..., Iterator[int]]


class Flat:
    """The bytes of a bucket on a GPU."""

    def to(self, device: Any) -> Flat:
        return self

    def contiguous(self) -> Flat:
        return self

    def numel(self) -> int:
        return 1


class Engine:
    """An engine in a group with ranks of the trainer, and its process."""

    queues_buckets = True

    def __init__(self, name: str, members: Sequence[int], buckets: int) -> None:
        self.name = name
        self.members = members
        self.meetings = [Meeting(len(members) + 1) for _ in range(buckets)]
        self.communicator = Meeting(len(members) + 1)
        self.called = [threading.Event() for _ in range(buckets)]
        self.received = [threading.Event() for _ in range(buckets)]

    def run(self) -> None:
        self.called[0].wait()
        time.sleep(COMES_TOGETHER_S)
        self.communicator()
        for called, meeting, received in zip(self.called, self.meetings, self.received):
            called.wait()
            meeting()
            received.set()

    async def receive_bucket(self, index: int, flat: None) -> None:
        self.called[index].set()
        await asyncio.to_thread(self.received[index].wait)


class Publication:
    """Ranks of a trainer, of which some are in the groups of engines.

    Args:
        orders: what each rank does for each bucket.
        engines: the ranks in the group of each engine, the one that sends first.
        sender: of the ranks.
        queues: of each rank's GPU.
        allocates: whether each allocation in a publication is one of the driver, which waits for
            the whole GPU; else torch has the memory from earlier ones.
        prefetched: of single ranks, where it is not the real one.
    """

    def __init__(
        self,
        orders: Sequence[RankOrder],
        engines: Sequence[Sequence[int]],
        *,
        sender: type[GroupSender] = GroupSender,
        queues: Queues = Queues.MANY,
        allocates: bool = True,
        prefetched: dict[int, Prefetched] | None = None,
    ) -> None:
        self.orders = orders
        self.buckets = len(orders[0].buckets)
        self.sender = sender
        self.allocates = allocates
        self.prefetched = prefetched or {}
        world = len(orders)
        self.devices = [Device(queues) for _ in range(world)]
        self.local = threading.local()
        self.engines = [
            Engine(f"engine-{number}", members, self.buckets)
            for number, members in enumerate(engines)
        ]
        self.lock = threading.Lock()
        # Of the trainer: the announcements and broadcasts by number, and the transfers by sender,
        # recipient and number.
        self.announced: dict[int, threading.Event] = defaultdict(threading.Event)
        self.broadcasts: dict[int, Meeting] = defaultdict(lambda: Meeting(world))
        self.transfers: dict[tuple[int, int, int], Meeting] = defaultdict(lambda: Meeting(2))
        targets = [engine.run for engine in self.engines]
        targets += [lambda rank=rank: self.rank(rank) for rank in range(world)]  # type: ignore[misc]
        self.threads = [threading.Thread(target=target, daemon=True) for target in targets]

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
        deadline = time.monotonic() + LIMIT_S
        while any(thread.is_alive() for thread in self.threads):
            assert time.monotonic() < deadline
            for engine in self.engines:
                for meeting in (*engine.meetings, engine.communicator):
                    meeting.end()
            with self.lock:
                meetings = [*self.broadcasts.values(), *self.transfers.values()]
                announced = [*self.announced.values()]
            for meeting in meetings:
                meeting.end()
            for event in announced:
                event.set()
            self.threads[0].join(0.01)
            self.threads = [thread for thread in self.threads if thread.is_alive()]

    # --- the ranks --------------------------------------------------------------------------------

    def rank(self, rank: int) -> None:
        """What `WeightPublisher` has a rank do: gather each bucket, and send it."""
        order = self.orders[rank]
        device: Any = SimpleNamespace(type="cuda", index=rank)
        trainer = TrainerRank(self, rank)
        serve = self.rank_0() if rank == 0 else self.sending_rank(rank)

        def make(index: int) -> int:
            trainer.do(order.buckets[index])
            return index

        if order.prefetches:
            way = self.prefetched.get(rank, prefetch.prefetched)
            for index in way(make, range(self.buckets), device):
                serve(index)
        else:
            for index in range(self.buckets):
                serve(make(index))
        trainer.do(order.end)

    def rank_0(self) -> Callable[[int], None]:
        """What rank 0 does: it has the engines called, and sends as every rank."""
        links = [
            EngineLink(engine, "nccl", engine.members, LIMIT_S)  # type: ignore[arg-type]
            for engine in self.engines
        ]
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        send = self.sending_rank(0)

        def on_links(step: Callable[[EngineLink], Any]) -> Any:
            return [asyncio.run_coroutine_threadsafe(step(link), loop) for link in links]

        def serve(index: int) -> None:
            calls = on_links(lambda link: link.send(range(index, min(index + 2, self.buckets))))
            send(index)
            # Rank 0 computes the bucket's digest.
            self.devices[0].default.record_event().wait()
            assert not any(call.result() for call in calls)
            if index == self.buckets - 1:
                assert not any(call.result() for call in on_links(lambda link: link.drain()))

        return serve

    def sending_rank(self, rank: int) -> Callable[[int], None]:
        served = [engine for engine in self.engines if rank in engine.members]
        if not served:
            return lambda index: None
        sender = self.sender(CPU, LIMIT_S)
        sender._groups = {engine.name: Group(self, engine, rank) for engine in served}
        sender._orders = [
            Order(engine.name, "http://10.0.0.9:1", 1, "nccl", None, engine.members,
                  engine.members.index(rank))
            for engine in served
        ]  # fmt: skip
        return lambda index: sender.send(
            SimpleNamespace(index=index),  # type: ignore[arg-type]
            Flat(),  # type: ignore[arg-type]
            lambda: None,
        )

    def of(self, among: dict[K, V], key: K) -> V:
        """The value under a key, which the first of all threads makes."""
        with self.lock:
            return among[key]

    # --- CUDA -------------------------------------------------------------------------------------

    def current(self, device: Any) -> Stream:
        return getattr(self.local, "stream", None) or self.devices[device.index].default

    def stream(self, device: Any) -> Stream:
        return Stream(self.devices[device.index])

    def allocate(self, device: Any) -> None:
        if self.allocates:
            self.devices[device.index].synchronize()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = None


class TrainerRank:
    """Enqueues what a rank of the trainer does for its buckets."""

    def __init__(self, publication: Publication, rank: int) -> None:
        self.publication = publication
        self.rank = rank
        self.device = SimpleNamespace(index=rank)
        # The stream of its group for transfers, and the events at the ends of batches.
        self.group = Stream(publication.devices[rank])
        self.ended: dict[int, threading.Event] = {}
        self.count: Counter[Any] = Counter()

    def do(self, ops: Sequence[Op]) -> None:
        for what, *given in ops:
            getattr(self, what)(*given)

    def announce(self, waits: bool) -> None:
        """Rank 0 announces a bucket over gloo; for this the others wait on the host."""
        event = self.publication.of(self.publication.announced, self.number("announced"))
        if waits:
            event.wait()
        else:
            event.set()

    def allocate(self) -> None:
        self.publication.allocate(self.device)

    def batch(self, number: int, transfers: Sequence[tuple[str, int]]) -> None:
        """Sends and receives of one kernel, which ends when all peers have begun theirs."""
        meetings = []
        for kind, peer in transfers:
            way = (self.rank, peer) if kind == "isend" else (peer, self.rank)
            key = (*way, self.number(way))
            meetings.append(self.publication.of(self.publication.transfers, key))

        def run() -> None:
            for meeting in meetings:
                meeting.begin()
            for meeting in meetings:
                meeting.wait()

        self.group.wait_event(self.publication.current(self.device).record_event())
        self.group.kernel(run)
        self.ended[number] = self.group.record_event()

    def wait(self, number: int) -> None:
        self.publication.current(self.device).wait_event(self.ended[number])

    def broadcast(self) -> None:
        """A call that waits for its work: torch runs it on the caller's stream."""
        meeting = self.publication.of(self.publication.broadcasts, self.number("broadcast"))
        self.publication.current(self.device).kernel(meeting)

    def number(self, of: Any) -> int:
        self.count[of] += 1
        return self.count[of]


class Group(WeightGroup):
    """A weight group whose broadcasts are as NCCL's."""

    def __init__(self, publication: Publication, engine: Engine, rank: int) -> None:
        self.publication = publication
        self.engine = engine
        self.address = GroupAddress("here", 1, 2, "nccl", LIMIT_S)
        self.rank = engine.members.index(rank)
        self.device = SimpleNamespace(type="cuda", index=rank)  # type: ignore[assignment]
        self._group = object()
        self._sending = None
        self._nccl = Stream(publication.devices[rank])
        self._next = 0

    def _broadcast(self, flat: Any) -> None:
        if self._next == 0:
            self.engine.communicator()
        default = self.publication.devices[self.device.index].default
        # as torch's ProcessGroupNCCL: behind what the caller's stream has at this moment
        self._nccl.wait_event(default.record_event())
        self._nccl.kernel(self.engine.meetings[self._next])
        self._next += 1
        ended = self._nccl.record_event()
        ended.wait()
        default.wait_event(ended)

    def close(self) -> None: ...


def publication(
    monkeypatch: pytest.MonkeyPatch,
    orders: Sequence[RankOrder],
    engines: Sequence[Sequence[int]],
    **given: Any,
) -> Publication:
    made = Publication(orders, engines, **given)
    cuda = SimpleNamespace(Stream=made.stream, current_stream=made.current, stream=made.on)
    stand_in = SimpleNamespace(no_grad=torch.no_grad, cuda=cuda, device=torch.device)
    monkeypatch.setattr(prefetch, "torch", stand_in)

    def empty(size: int, *, dtype: torch.dtype, device: Any) -> Flat:
        made.allocate(device)
        return Flat()

    cuda = SimpleNamespace(is_available=lambda: False)
    stand_in = SimpleNamespace(empty=empty, uint8=torch.uint8, cuda=cuda)
    monkeypatch.setattr(process_group, "torch", stand_in)
    return made
