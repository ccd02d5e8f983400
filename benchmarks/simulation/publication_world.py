"""A publication to many engines in simulated time: nothing is transferred.

Real are the order of a publication (`WeightPublication`), the choice of the rank for each engine,
the orders for the ranks and the calls to engines, several of them ahead (`DistributedTransport`
and its links), and the turns that engines give to calls (`BucketTurns`). Simulated are

    a rank of the trainer   has a bucket when all ranks have sent the one before the last: buckets
                            are assembled over NVLink, and broadcast over the network cards of all
                            nodes, one ahead. It sends a bucket to its engines at once, and the next
                            one when that has left, as `GroupSender` does. Ranks that help it carry
                            equal parts of each bucket, and wait as it does
    a network card          each rank has one, whose rate its transfers share
    an engine               has a card for each GPU; one with our patches has the GPU load a bucket
                            while it receives the next, and its process prepares that meanwhile; a
                            stock server takes a bucket, loads it, and then takes the next
    a control call          costs the event loop of the service, which makes one after the other,
                            and the way to the engine and back
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulation.virtual_time import Link as Card
from benchmarks.simulation.virtual_time import Turns, simulated
from rlcore.config import Config
from rlcore.interfaces import RankAddress
from rlcore.weights import Bucket
from rollout.engines.bucket_turns import BucketTurns
from rollout.fleet.publication import WeightPublication
from rollout.weight_sync import distributed
from rollout.weight_sync.distributed import DistributedTransport
from rollout.weight_sync.process_group import GroupAddress
from rollout.weight_sync.sender import Order
from tests.static_participants import StaticParticipants

NODE = 8  # ranks of the trainer, each with a network card


@dataclass(frozen=True)
class Costs:
    """Bytes and seconds of the parts of a publication."""

    card: float = 48e9  # bytes/s through one network card of 400 Gbit/s
    nvlink: float = 300e9  # bytes/s into one rank from its node
    broadcast: float = 192e9  # bytes/s to all ranks of the trainer: half of a node's cards
    load_s: float = 0.006  # of an engine's process, a bucket, beside the transfer
    stock_load_s: float = 0.016  # of a stock server's
    load_rate: float = 1e12  # bytes/s at which an engine copies a bucket into its weights
    digest_rate: float = 120e9  # bytes/s of a GPU, which has computed that before it copies
    quantise_rate: float = 85e9  # bytes/s in bf16 that a rank's GPU rounds to FP8
    way_s: float = 0.0035  # of a control call, there and back
    call_s: float = 0.0003  # of the service's CPU, a control call


@dataclass(frozen=True)
class Published:
    """The outcome of a publication: its seconds, and the bytes that each rank sent to engines."""

    seconds: float
    sent: dict[int, int]


class SimulatedEngine:
    """Implements what `DistributedTransport` and `WeightPublication` ask of an engine."""

    def __init__(self, number: int, world: World, *, gpus: int, queues_buckets: bool) -> None:
        self.name = f"engine-{number}"
        self.url = f"http://10.0.{number // 250}.{number % 250 + 1}:30000"
        self.group_ranks = gpus
        self.in_group: str | None = None
        self.queues_buckets = queues_buckets
        self._world = world
        self._turns = BucketTurns()
        self._receives: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._received: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._loads: list[asyncio.Future[None]] = []  # on the GPU, of all buckets so far

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        costs = self._world.costs
        await self._world.service.work(costs.call_s)
        await asyncio.sleep(costs.way_s / 2)
        yield
        await asyncio.sleep(costs.way_s / 2)

    async def health(self) -> dict[str, Any]:
        async with self._call():
            return {"gpu": self.name}

    async def _nothing(self, *_: Any) -> None:
        async with self._call():
            pass

    pause = _nothing
    set_version = _nothing
    resume = _nothing

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        async with self._call():
            self._turns.begin()

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        async with self._call():
            self.in_group = address.name

    async def end_update(self) -> None:
        async with self._call():
            await asyncio.gather(*self._loads)

    async def receive_bucket(self, index: int, flat: None) -> None:
        costs = self._world.costs
        async with self._call(), self._turns.take(index):
            self._receives[index].set()
            if not self.queues_buckets:
                await self._received[index].wait()
                size = self._world.buckets[index].num_bytes
                await asyncio.sleep(costs.stock_load_s + size / costs.load_rate)
                return
            before = self._loads[-1:]
            self._loads.append(asyncio.ensure_future(self._load(index, before)))
            await asyncio.sleep(costs.load_s)
            await asyncio.gather(*before)

    async def _load(self, index: int, before: Sequence[asyncio.Future[None]]) -> None:
        """What the GPU does, one bucket after the other: the digest, and the copies."""
        await self._received[index].wait()
        await asyncio.gather(*before)
        size = self._world.buckets[index].num_bytes
        costs = self._world.costs
        await asyncio.sleep(size / costs.digest_rate + size / costs.load_rate)

    async def take_from(self, ranks: Sequence[int], bucket: Bucket) -> None:
        """Have the first of the ranks broadcast a bucket in the group of all with this engine."""
        await self._receives[bucket.index].wait()
        part = bucket.num_bytes / len(ranks)
        await asyncio.gather(*(self._world.cards[rank].carry(part) for rank in ranks))
        self._world.sent[ranks[0]] += bucket.num_bytes
        self._received[bucket.index].set()


def _address(engine: str) -> GroupAddress:
    return GroupAddress("10.1.0.1", 1, 2, "nccl", 300.0, f"weights-{engine}")


class World:
    """The ranks of a trainer and the engines to which they publish.

    Args:
        ranks: of the trainer.
        gpus: of an engine.
        senders, rails: at most; None: as a run chooses on GPUs.
        calls_ahead: engines are servers with our patches, which take calls of later buckets while
            they take one; else stock ones.
        whole: the buckets as they are assembled, where that rank then rounds them to FP8.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        ranks: int,
        engines: int,
        costs: Costs,
        gpus: int = 1,
        senders: int | None = None,
        rails: int | None = None,
        calls_ahead: bool = True,
        whole: Sequence[Bucket] | None = None,
    ) -> None:
        self.buckets = buckets
        self._whole = whole
        self.costs = costs
        self.service = Turns()
        self.cards = [Card(costs.card) for _ in range(ranks)]  # what leaves them
        self.sent: Counter[int] = Counter()
        self._engines = [
            SimulatedEngine(i, self, gpus=gpus, queues_buckets=calls_ahead) for i in range(engines)
        ]
        self._ranks = [RankAddress(f"node-{rank // NODE}", f"gpu-{rank}") for rank in range(ranks)]
        self._senders = senders
        self._rails = rails
        self._tasks: set[asyncio.Task[None]] = set()
        self._made = [asyncio.Event() for _ in buckets]
        self._sent_by = [0] * len(buckets)  # ranks that have sent a bucket
        self._free = [asyncio.Event() for _ in buckets]

    def start(self, work: Any) -> None:
        """Run a coroutine beside the caller."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def publish(self) -> Published:
        """Publish to all engines."""
        fleet: Any = StaticParticipants(self._engines)  # type: ignore[arg-type]
        publication = WeightPublication(_config(), fleet)
        publication._transports[False] = DistributedTransport(
            timeout_s=300.0, probe_s=10.0, senders=self._senders, rails=self._rails
        )
        ordered = await publication.open(self.buckets, self._ranks, False)
        orders = {
            rank: [Order(**one) for one in order["engines"]]
            for rank, order in ordered.ranks.items()
        }
        await publication.join(
            {
                rank: {one.engine: asdict(_address(one.engine)) for one in order}
                for rank, order in orders.items()
            }
        )
        sending = [own for order in orders.values() if (own := [o for o in order if not o.rank])]
        self._senders_of_a_bucket = 1 + len(sending)
        self.start(self._make([*orders]))
        await asyncio.gather(self._rank_0(publication), *(self._rank(own) for own in sending))
        await publication.finish(1, {})
        return Published(asyncio.get_running_loop().time(), dict(self.sent))

    async def _make(self, senders: Sequence[int]) -> None:
        """Assemble the buckets: each is there on all ranks at once."""
        for index, bucket in enumerate(self.buckets):
            if index > 1:
                await self._free[index - 2].wait()
            size = bucket.num_bytes
            whole = size if self._whole is None else self._whole[index].num_bytes
            if self._whole is not None:
                await asyncio.sleep(whole / self.costs.quantise_rate)
            if len(senders) > 1:
                await asyncio.sleep(whole / self.costs.nvlink)
                passing = [self.cards[rank].carry(size / NODE) for rank in senders]
                await asyncio.gather(asyncio.sleep(size / self.costs.broadcast), *passing)
            elif len(self._ranks) > 1:
                await asyncio.sleep(size / self.costs.card)  # into the card of rank 0
            self._made[index].set()

    async def _rank_0(self, publication: WeightPublication) -> None:
        for bucket in self.buckets:
            await self._made[bucket.index].wait()
            await publication.send(bucket.index, {})
            self._leave(bucket)

    async def _rank(self, orders: Sequence[Order]) -> None:
        """What `GroupSender` does on a rank that sends."""
        named = {engine.name: engine for engine in self._engines}
        for bucket in self.buckets:
            await self._made[bucket.index].wait()
            await asyncio.gather(
                *(named[order.engine].take_from(order.trainer, bucket) for order in orders)
            )
            self._leave(bucket)

    def _leave(self, bucket: Bucket) -> None:
        self._sent_by[bucket.index] += 1
        if self._sent_by[bucket.index] == self._senders_of_a_bucket:
            self._free[bucket.index].set()


def _config() -> Config:
    return Config.model_validate(
        {
            "run": {"name": "simulated"},
            "model": {"path": "none"},
            "data": {"paths": "none.jsonl"},
            "training": {"steps": 1},
        }
    )


def publish(buckets: Sequence[Bucket], **world: Any) -> Published:
    """Publish `buckets` once in a `World`."""

    async def run() -> Published:
        return await World(buckets, **world).publish()

    # simulated engines compute no digests, which a run would warn of
    warnings = logging.getLogger(distributed.__name__)
    before = warnings.level
    warnings.setLevel(logging.ERROR)
    try:
        return simulated(run())
    finally:
        warnings.setLevel(before)
