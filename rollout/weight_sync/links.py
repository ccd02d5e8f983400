"""Engines in other processes take each bucket over process groups (process_group.py).

Each engine has a group of its own with one rank of the trainer, which sends it every bucket:

    Link        of rank 0 with an engine
    RemoteLink  of another rank with an engine; rank 0, which alone talks to engines, asks the
                engine to receive
    RankSender  the other rank's side: it meets the engines that rank 0 names, and sends

All links send at once. A hung engine holds up nobody but the rank that serves it, and that one no
longer than until rank 0 gives the publication up.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.deadlines import GROUP_JOIN_S
from rlcore.errors import EngineFailed, RunFailed
from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, Transport, ask
from rollout.weight_sync.bucket_checks import SentDigests, Wanted, digest_kind
from rollout.weight_sync.process_group import (
    Backend,
    GroupAddress,
    WeightGroup,
    choose_backend,
    close_late,
    gpu_identity,
    in_thread,
    is_loopback,
    meeting_place,
    start_thread,
)

GIVEN_UP_POLL_S = 0.02  # how often a rank that waits for an engine looks whether rank 0 still does
# Another rank may begin a bucket while rank 0 waits for an engine that has not taken the one before
# it. Its deadline comes later, so that it is rank 0's that counts.
AHEAD = 2.0

logger = logging.getLogger(__name__)


class DistributedTransport(Transport):
    """Broadcasts the weights in a group with each engine, which has these members:

        url           where it is reached; the way there tells which address of ours it can reach
        group_ranks   the ranks of the group that are its own: its tensor-parallel ranks
        in_group      the name of its group; None again after a start or a new connection
        join_group(address, rank)
                      leaves its group and enters another, with the ranks from `rank` on; returns
                      when all ranks of the group are there
        receive_bucket(index, None)
                      receives bucket `index` over the group, and loads it
        health()      tells under `gpu` what identifies its GPU; None stands for the CPU, and for a
                      GPU that it shares with the trainer

    and, if its `digests_buckets` is true, `receive_bucket(index, None, order)` for a digest of what
    it receives (digests.py), and `bucket_digests()`: those since `begin_update`, by index.

    Args:
        senders: the ranks that engines are dealt to; None: on GPUs as many as there are engines,
            on the CPU rank 0 alone.
    """

    name = "distributed"

    def __init__(
        self,
        *,
        device: torch.device,
        timeout_s: float,
        probe_s: float,
        digests: Wanted = "auto",
        senders: int | None = None,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._device = device
        self._probe_s = probe_s
        self._senders = senders
        self._links: dict[Engine, Link | RemoteLink] = {}
        self._ranks: dict[Engine, int] = {}  # that serve them, as long as the run lasts
        self._digests = digests
        self._sent = SentDigests()  # in the current transaction

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Join a group with each engine, unless one from an earlier publication is still whole.

        Engines that other ranks serve come to their groups in `meet`.
        """
        for engine in [engine for engine, link in self._links.items() if not link.is_whole]:
            self._links.pop(engine).close()
        new = [engine for engine in engines if engine not in self._links]
        answers = await ask(new, "health", lambda e: e.health(), self._probe_s)
        failed = answers.failed
        for engine in [engine for engine in new if engine in answers.results]:
            try:
                if engine not in self._ranks:
                    # one that joined may be alone in this transaction
                    known = len({*self._ranks, *engines})
                    self._ranks[engine] = self._choose_rank(engine, known)
            except EngineFailed as error:  # recovery: without this engine, by the caller
                failed[engine] = f"engine {engine.name} cannot be met: {error}"
                continue
            self._links[engine] = self._new_link(engine, answers.results[engine]["gpu"])
        self._engines = [engine for engine in engines if engine not in failed]
        self._sent = SentDigests()
        return failed | await self._on_links(lambda link: link.join())

    def _choose_rank(self, engine: Engine, engines: int) -> int:
        """The rank with the fewest engines, of those that reach this one."""
        places = self.trainer_ranks
        count = self._senders or (engines if self._device.type == "cuda" else 1)
        ranks = spread(len(places), count) if places else [0]
        if is_loopback(urlsplit(engine.url).hostname or ""):
            ranks = [rank for rank in ranks if not rank or places[rank].host == places[0].host]
        busy = Counter(self._ranks.values())
        return min(ranks, key=lambda rank: busy[rank])

    def _new_link(self, engine: Engine, gpu: str | None) -> Link | RemoteLink:
        rank = self._ranks[engine]
        if rank:
            backend = choose_backend(self.trainer_ranks[rank].gpu, gpu)
            return RemoteLink(engine, backend, rank, self._timeout_s)
        backend = choose_backend(gpu_identity(self._device), gpu)
        return Link(engine, backend, self._device, self._timeout_s)

    @property
    def orders(self) -> dict[int, str]:
        """What `RankSender.open` of each rank that serves engines of this transaction is told."""
        remote: dict[int, list[dict[str, Any]]] = {}
        for engine in self._engines:
            link = self._links[engine]
            if isinstance(link, RemoteLink) and link.order is not None:
                remote.setdefault(link.rank, []).append(asdict(link.order))
        return {rank: json.dumps(orders) for rank, orders in remote.items()}

    async def meet(self, places: Mapping[int, str]) -> Failures:
        """Have engines enter the groups that other ranks have opened for them.

        Who does not get there is served by rank 0 from then on.
        """
        remote = [link for link in self._links_now() if isinstance(link, RemoteLink)]
        reasons = await asyncio.gather(*(link.meet(places.get(link.rank, "")) for link in remote))
        failed = {link.engine: why for link, why in zip(remote, reasons) if why is not None}
        for engine in failed:
            self._ranks[engine] = 0
            del self._links[engine]
        return failed

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Broadcast the bucket in all groups at once."""
        if all(link.backend == "gloo" for link in self._links_now()):
            flat = flat.cpu()  # once for all
        orders = SentDigests.orders(map(self._kind, self._engines))
        sending = self._on_links(
            lambda link: link.send(bucket, flat, orders[self._kind(link.engine)])
        )
        failed, _ = await asyncio.gather(sending, self._sent.add(bucket, flat, orders))
        return failed

    async def complete(self) -> Failures:
        """Compare the digests of what the engines received with those of what was sent."""
        return await self._sent.compare(
            {engine: self._kind(engine) for engine in self._engines}, self._timeout_s
        )

    def _kind(self, engine: Engine) -> str | None:
        return digest_kind(self._digests, engine, self._links[engine].backend)

    async def close(self) -> None:
        """Close all groups."""
        await super().close()
        for link in self._links.values():
            link.close()
        self._links = {}

    def _links_now(self) -> list[Link | RemoteLink]:
        return [self._links[engine] for engine in self._engines]

    async def _on_links(self, step: Callable[[Link | RemoteLink], Any]) -> Failures:
        reasons = await asyncio.gather(*map(step, self._links_now()))
        return {engine: why for engine, why in zip(self._engines, reasons) if why is not None}


def spread(world_size: int, count: int) -> list[int]:
    """`count` ranks of a world, or all of them, rank 0 first, as far apart as they can be: on as
    many machines as there are.
    """
    count = min(count, world_size)
    return [i * world_size // count for i in range(count)]


async def asked(
    engine: Engine, what: str, call: Callable[[Any], Any], seconds: float
) -> str | None:
    """Ask one engine. Returns why it failed, or None."""
    return (await ask([engine], what, call, seconds)).failed.get(engine)


# --- rank 0 ---------------------------------------------------------------------------------------


class Link:
    """The process group of the trainer's rank 0 and one engine.

    `join` and `send` return why the engine failed, or None.
    """

    def __init__(
        self, engine: Engine, backend: Backend, device: torch.device, timeout_s: float
    ) -> None:
        self.engine = engine
        self.backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self.group: WeightGroup | None = None

    @property
    def is_whole(self) -> bool:
        """Whether both sides are in it. An engine that was started again is in no group."""
        return (
            self.group is not None
            and self.group.is_open
            and self.group.address.name == self.engine.in_group
        )

    async def join(self) -> str | None:
        """Make the group unless it is whole."""
        if self.is_whole:
            return None
        limit = min(self._timeout_s, GROUP_JOIN_S)
        try:
            url = self.engine.url
            ranks = self.engine.group_ranks
            address, store = await asyncio.to_thread(
                meeting_place, url, ranks, self.backend, self._timeout_s
            )
        # recovery: without this engine, by the caller
        except (EngineFailed, OSError, dist.DistError) as error:
            return f"engine {self.engine.name} cannot be met: {error}"
        meeting = in_thread(
            lambda: WeightGroup(address, 0, device=self._device, store=store), self._device
        )
        why = await asked(self.engine, "join_group", lambda e: e.join_group(address, 1), limit)
        if why is not None:
            meeting.add_done_callback(close_late)
            return why
        done, _ = await asyncio.wait({meeting}, timeout=limit)
        if not done:
            meeting.add_done_callback(close_late)
            return f"engine {self.engine.name} was not met by our side within {limit:g} s"
        try:
            self.group = meeting.result()
        except RunFailed as error:  # recovery: as above
            return str(error)
        return None

    async def send(self, bucket: Bucket, flat: Tensor, order: str | None = None) -> str | None:
        """Broadcast the bucket, and wait until the engine has loaded it (and made its digest)."""
        group = self.group
        assert group is not None, "open the transport first"
        sending = in_thread(lambda: group.send(flat), self._device)
        try:
            why = await receive(self.engine, bucket, order, self._timeout_s)
        # half a bucket may have been sent: the next publication needs a new group
        except asyncio.CancelledError:
            self.close()
            raise
        # our side may hang until its own deadline, and is not waited for
        if why is not None:
            sending.add_done_callback(lambda done: done.exception())
            self.close()
            return why
        try:
            await sending
        except RunFailed as error:  # recovery: as above
            self.close()
            return str(error)
        return None

    def close(self) -> None:
        """Close the group, if there is one."""
        if self.group is not None:
            self.group.close()
            self.group = None


async def receive(engine: Engine, bucket: Bucket, order: str | None, seconds: float) -> str | None:
    """Have an engine receive and load a bucket. Returns why it failed, or None."""
    ordered = () if order is None else (order,)
    return await asked(
        engine, "receive_bucket", lambda e: e.receive_bucket(bucket.index, None, *ordered), seconds
    )


@dataclass(frozen=True)
class Order:
    """An engine that another rank is to serve: its name, its address, the ranks of the group that
    are its own, and the name of the group that it is in.
    """

    engine: str
    url: str
    ranks: int
    backend: Backend
    group: str | None


class RemoteLink:
    """The process group of another rank of the trainer and one engine, as rank 0 sees it.

    `meet` and `send` return why the engine failed, or None.
    """

    def __init__(self, engine: Engine, backend: Backend, rank: int, timeout_s: float) -> None:
        self.engine = engine
        self.backend = backend
        self.rank = rank
        self._timeout_s = timeout_s
        self.order: Order | None = None  # for the rank, in this publication

    @property
    def is_whole(self) -> bool:
        """Whether the engine was not started again. What its rank has is told in `meet`."""
        return self.engine.in_group is not None

    async def join(self) -> str | None:
        """Prepare the order for the rank, which is not there yet."""
        engine = self.engine
        try:
            self.order = Order(
                engine.name, engine.url, engine.group_ranks, self.backend, engine.in_group
            )
        except EngineFailed as error:  # recovery: without this engine, by the caller
            return f"engine {engine.name} cannot be met: {error}"
        return None

    async def meet(self, told: str) -> str | None:
        """Have the engine enter the group that its rank has opened.

        Args:
            told: what `RankSender.open` returned there: the address of each engine's group; None
                where the last one is whole; else why there is none.
        """
        try:
            place = json.loads(told)[self.engine.name]
            if place is None:
                return None
            if isinstance(place, str):
                return f"engine {self.engine.name} cannot be met by rank {self.rank}: {place}"
            address = GroupAddress(**place)
        except (ValueError, TypeError, KeyError):
            return f"rank {self.rank} told no place for engine {self.engine.name}: {told[:80]!r}"
        limit = min(self._timeout_s, GROUP_JOIN_S)
        return await asked(self.engine, "join_group", lambda e: e.join_group(address, 1), limit)

    async def send(self, bucket: Bucket, flat: Tensor, order: str | None = None) -> str | None:
        """Wait until the engine has loaded what its rank sends."""
        return await receive(self.engine, bucket, order, self._timeout_s)

    def close(self) -> None:
        """Nothing: the rank closes its own side."""


# --- another rank ---------------------------------------------------------------------------------


class RankSender:
    """Implements `rlcore.interfaces.BucketSender` over process groups.

    Args:
        timeout_s: for one bucket (`rollout.engine.update_timeout_s`).
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.gpu = gpu_identity(device)
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}  # by engine
        self._meetings: dict[str, Future[WeightGroup]] = {}
        self._served: list[str] = []  # in the current publication

    def open(self, order: str) -> str:
        """See `BucketSender.open`."""
        orders = [Order(**one) for one in json.loads(order)]
        self._served = [one.engine for one in orders]
        self._leave_meetings()  # of a publication that went no further
        return json.dumps({one.engine: self._open(one) for one in orders})

    def _open(self, order: Order) -> dict[str, Any] | str | None:
        """Open a group, and wait for the engine in a thread. Returns what `meet` is told."""
        group = self._groups.get(order.engine)
        if group is not None and group.is_open and group.address.name == order.group:
            return None
        self._drop(order.engine)
        try:
            address, store = meeting_place(
                order.url, order.ranks, order.backend, AHEAD * self._timeout_s
            )
        except (OSError, dist.DistError) as error:  # recovery: without this engine, by rank 0
            return str(error)
        self._meetings[order.engine] = start_thread(
            lambda: WeightGroup(address, 0, device=self._device, store=store), self._device
        )
        return asdict(address)

    def send(self, bucket: Bucket, flat: Tensor, given_up: Callable[[], bool]) -> None:
        """See `BucketSender.send`."""
        if given_up():
            return
        self._end_meetings()
        sending = {
            engine: start_thread(partial(self._groups[engine].send, flat), self._device)
            for engine in self._served
            if engine in self._groups  # else it failed at an earlier bucket
        }
        while waiting := {one: done for one, done in sending.items() if not done.done()}:
            wait(waiting.values(), timeout=GIVEN_UP_POLL_S)
            if given_up():  # what is half sent ends with its group
                for engine in waiting:
                    self._drop(engine)
                return
        for engine, done in sending.items():
            if (error := done.exception()) is not None:
                self._fail(engine, f"bucket {bucket.index} was not sent: {error}")

    def _end_meetings(self) -> None:
        """Take the groups that have come together: rank 0 has heard so from the engines."""
        for engine, meeting in self._meetings.items():
            try:
                self._groups[engine] = meeting.result(min(self._timeout_s, GROUP_JOIN_S))
            except (RunFailed, TimeoutError) as error:
                meeting.add_done_callback(close_late)
                self._fail(engine, str(error))
        self._meetings = {}

    def _leave_meetings(self) -> None:
        for meeting in self._meetings.values():
            meeting.add_done_callback(close_late)
        self._meetings = {}

    def _fail(self, engine: str, why: str) -> None:
        """Recovery: the engine fails too, and rank 0 goes on without it."""
        logger.warning("engine %s is not served any more: %s", engine, why)
        self._drop(engine)

    def _drop(self, engine: str) -> None:
        if (group := self._groups.pop(engine, None)) is not None:
            group.close()

    def abandon(self) -> None:
        """See `BucketSender.abandon`: NCCL takes a small broadcast that nobody receives."""
        for engine in self._served:
            self._drop(engine)

    def close(self) -> None:
        """See `BucketSender.close`."""
        for engine in [*self._groups]:
            self._drop(engine)
        self._leave_meetings()
