"""Rank 0's side of the process group that each engine has with ranks of the trainer.

Calls       the calls by which an engine is to take buckets, a fixed number of them ahead
Link        of rank 0 with an engine
RemoteLink  of another rank, and of those that help it, with an engine, which rank 0, who alone
            talks to engines, asks to receive
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.deadlines import CANCEL_S, ENGINE_GRACE_S, GROUP_JOIN_S
from rlcore.errors import EngineFailed, RunFailed
from rlcore.weights import Bucket
from rollout.weight_sync.base import CALLS_AT_ONCE, Engine, ask, describe
from rollout.weight_sync.groups.assignment import Served
from rollout.weight_sync.process_group import (
    Backend,
    GroupAddress,
    WeightGroup,
    close_late,
    in_thread,
    meeting_place,
)

# An engine waits for a bucket while another one holds up the bucket before, and another rank may
# begin one while rank 0 waits for that. The deadline of broadcasts comes later, so that it is rank
# 0's for an answer that counts.
AHEAD = 3.0


async def asked(
    engine: Engine, what: str, call: Callable[[Any], Any], seconds: float
) -> str | None:
    """Ask one engine. Returns why it failed, or None."""
    return (await ask([engine], what, call, seconds)).failed.get(engine)


class Calls:
    """The calls to one engine to receive and load buckets.

    An engine that queues calls (`queues_buckets`) is called for the bucket that follows, too, and
    has up to `CALLS_AT_ONCE` calls; another one has one, so that no two can overtake each other.

    Args:
        timeout_s: for one bucket, from when its answer is waited for: before that, the rank that
            sends it may be held up by another engine.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        # that are not known to have succeeded, in the order of buckets
        self._calls: list[asyncio.Task[str | None]] = []
        self.last = -1  # the bucket up to which the engine was called, in this publication

    @property
    def queued(self) -> bool:
        """Whether the engine queues calls."""
        return bool(getattr(self._engine, "queues_buckets", False))

    @property
    def most(self) -> int:
        """How many calls may stay unanswered when a bucket has left."""
        return CALLS_AT_ONCE - 1 if self.queued else 0

    def post(self, indices: Sequence[int], order: str | None) -> None:
        """Call the engine for buckets, each once.

        Args:
            indices: of a bucket, and of the one that follows.
            order: for a digest of what it receives.
        """
        for index in indices[: 2 if self.queued else 1]:
            if index > self.last:
                self._calls.append(asyncio.ensure_future(self._call(index, order)))
                self.last = index

    async def _call(self, index: int, order: str | None) -> str | None:
        ordered = () if order is None else (order,)
        try:
            await self._engine.receive_bucket(index, None, *ordered)
        except Exception as error:  # noqa: BLE001 - recovery: without this engine, by the caller
            return describe(error)
        return None

    async def settle(
        self, most: int, sending: Future[None] | None = None, beyond: int = 0
    ) -> str | None:
        """Wait until at most `most` calls are unanswered, and `sending` is done.

        Args:
            beyond: how many calls are for later buckets than the one that is sent: where it does
                not leave, they are not waited for.

        Returns why the engine failed, as soon as it is known; None if it did not. Its own reason
        comes before ours.
        """
        left = None if sending is None else asyncio.wrap_future(sending)
        oldest: asyncio.Task[str | None] | None = None
        deadline = math.inf
        while True:
            for call in self._calls:
                if call.done() and (why := call.result()) is not None:
                    return self._without(left, why)
            self._calls = [call for call in self._calls if not call.done()]
            failed = None if left is None or not left.done() else left.exception()
            if (left is None or left.done()) and len(self._calls) <= (beyond if failed else most):
                return None if failed is None else describe(failed)
            if self._calls and self._calls[0] is not oldest:
                oldest = self._calls[0]
                deadline = time.monotonic() + self._timeout_s + ENGINE_GRACE_S
            if (seconds := deadline - time.monotonic()) <= 0 and oldest is not None:
                return self._without(left, self._late)
            waiting: set[asyncio.Future[Any]] = {*self._calls}
            if left is not None and not left.done():
                waiting.add(left)
            await asyncio.wait(
                waiting,
                timeout=seconds if self._calls else None,
                return_when=asyncio.FIRST_COMPLETED,
            )

    @property
    def _late(self) -> str:
        return (
            f"engine {self._engine.name} did not answer receive_bucket within"
            f" {self._timeout_s:g} s (rollout.engine.update_timeout_s)"
        )

    @staticmethod
    def _without(left: asyncio.Future[None] | None, why: str) -> str:
        """Return `why`. Our side may hang until its own deadline, and is not waited for."""
        if left is not None:
            left.add_done_callback(lambda done: done.exception())
        return why

    async def drop(self) -> None:
        """Leave no call behind."""
        calls = self._calls
        self._calls = []
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=2 * CANCEL_S)


class EngineLink(ABC):
    """A process group of ranks of the trainer and one engine, as rank 0 sees it.

    Its coroutines return why the engine failed, or None.
    """

    def __init__(
        self, engine: Engine, backend: Backend, device: torch.device, timeout_s: float
    ) -> None:
        self.engine = engine
        self.backend = backend
        self.group: WeightGroup | None = None  # rank 0's side of it, where it has one
        self._device = device
        self._timeout_s = timeout_s
        self._calls = Calls(engine, timeout_s)

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether the engine is in it. One that was started again is in no group."""

    @abstractmethod
    async def join(self) -> str | None:
        """Make the group unless it is whole."""

    def close(self) -> None:
        """Close rank 0's side of the group, if there is one."""
        if self.group is not None:
            self.group.close()
            self.group = None

    @property
    def _both_are_in_it(self) -> bool:
        return (
            self.group is not None
            and self.group.is_open
            and self.group.address.name == self.engine.in_group
        )

    async def _meet(
        self, enter: Callable[[], WeightGroup], place: GroupAddress, rank: int
    ) -> str | None:
        """Have the engine enter a group from `rank` on, and rank 0 by `enter`, in a thread."""
        limit = min(self._timeout_s, GROUP_JOIN_S)
        meeting = in_thread(enter, self._device)
        why = await asked(self.engine, "join_group", lambda e: e.join_group(place, rank), limit)
        if why is not None:
            meeting.add_done_callback(close_late)
            return why
        done, _ = await asyncio.wait({meeting}, timeout=limit)
        if not done:
            meeting.add_done_callback(close_late)
            return f"engine {self.engine.name} was not met by our side within {limit:g} s"
        try:
            self.group = meeting.result()
        except RunFailed as error:  # recovery: without this engine, by the caller
            return str(error)
        return None

    def begin(self) -> None:
        """Begin a publication."""
        self._calls.last = -1

    @property
    def last(self) -> int:
        """The bucket up to which the engine was called in this publication; -1: for none."""
        return self._calls.last

    async def send(self, indices: Sequence[int], order: str | None, flat: Tensor) -> str | None:
        """Have the engine take a bucket. Return when it has left this rank, if this rank sends it,
        and the engine has room for the next call.

        Args:
            indices, order: see `Calls.post`.
        """
        try:
            sending = self._start_sending(flat)
        except RunFailed as error:  # recovery: without this engine, by the caller
            return await self._failed(str(error))
        self._calls.post(indices, order)
        beyond = self._calls.last - min(indices, default=self._calls.last)
        return await self._settle(self._calls.most, sending, beyond)

    async def send_called(self, flat: Tensor) -> str | None:
        """Send a bucket for which the engine was called before. Return when it has left."""
        return await self.send((), None, flat)

    async def settle(self) -> str | None:
        """Wait until the engine has loaded all that was sent (and made its digests)."""
        return await self._settle(0)

    def _start_sending(self, flat: Tensor) -> Future[None] | None:
        return None

    async def _settle(
        self, most: int, sending: Future[None] | None = None, beyond: int = 0
    ) -> str | None:
        try:
            why = await self._calls.settle(most, sending, beyond)
        # half a bucket may have been sent: the next publication needs a new group
        except asyncio.CancelledError:
            await self._failed("given up")
            raise
        return why if why is None else await self._failed(why)

    async def _failed(self, why: str) -> str:
        self.close()
        await self._calls.drop()
        return why


class Link(EngineLink):
    """The process group of the trainer's rank 0 and one engine."""

    @property
    def is_whole(self) -> bool:
        """Whether both sides are in it. An engine that was started again is in no group."""
        return self._both_are_in_it

    async def join(self) -> str | None:
        """Make the group unless it is whole."""
        if self.is_whole:
            return None
        try:
            url = self.engine.url
            ranks = self.engine.group_ranks
            address, store = await asyncio.to_thread(
                meeting_place, url, ranks, self.backend, AHEAD * self._timeout_s
            )
        # recovery: without this engine, by the caller
        except (EngineFailed, OSError, dist.DistError) as error:
            return f"engine {self.engine.name} cannot be met: {error}"
        return await self._meet(
            lambda: WeightGroup(address, 0, device=self._device, store=store), address, 1
        )

    def _start_sending(self, flat: Tensor) -> Future[None]:
        assert self.group is not None, "open the transport first"
        return self.group.start_sending(flat)


@dataclass(frozen=True)
class Order:
    """An engine that a rank is to serve, as its sender or as a helper of that."""

    engine: str
    url: str
    ranks: int  # of the group that are the engine's own
    backend: Backend
    group: str | None  # that the engine is in
    trainer: Sequence[int]  # the ranks of the trainer in the group, first the one that sends
    rank: int = 0  # in the group, of the rank that gets this order

    @property
    def others(self) -> int:
        """The ranks of the group beside the one that sends."""
        return len(self.trainer) - 1 + self.ranks


@dataclass(frozen=True)
class Stop:
    """Up to which bucket each engine was called in a publication that was given up; one that is out
    is not named. The others wait in a broadcast until they have that bucket: neither gloo nor NCCL
    lets them go. None: it was not given up.
    """

    last: Mapping[str, int] | None = None

    @classmethod
    def of(cls, word: str | None) -> Stop:
        """Read what rank 0 said; None where it has not given up."""
        return cls() if word is None else cls(json.loads(word))

    def lets(self, engine: str, bucket: Bucket) -> bool:
        """Whether a bucket is still sent to an engine."""
        return self.last is None or bucket.index <= self.last.get(engine, -1)


class RemoteLink(EngineLink):
    """The process group of another rank of the trainer, and of those that help it, and one engine.

    Where rank 0 is one that helps, it passes a bucket on as part of this.
    """

    def __init__(
        self,
        engine: Engine,
        backend: Backend,
        served: Served,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        super().__init__(engine, backend, device, timeout_s)
        self.served = served
        self.order: Order | None = None  # for the ranks, in this publication

    @property
    def is_whole(self) -> bool:
        """Whether the engine was not started again. What its ranks have is told in `meet`."""
        return self.engine.in_group is not None

    async def join(self) -> str | None:
        """Prepare the order for the ranks, which are not there yet."""
        engine = self.engine
        trainer = (self.served.sender, *self.served.helpers)
        try:
            self.order = Order(
                engine.name, engine.url, engine.group_ranks, self.backend, engine.in_group, trainer
            )
        except EngineFailed as error:  # recovery: without this engine, by the caller
            return f"engine {engine.name} cannot be met: {error}"
        return None

    async def meet(self, told: Mapping[int, str]) -> str | None:
        """Have the engine enter the group that its sender has opened.

        Args:
            told: what `RankSender.open` returned on each rank.
        """
        place = read_place(told, self.served.sender, self.engine.name)
        if isinstance(place, str):
            return place
        helpers = self.served.helpers
        if place is None:  # the last group is whole, for its sender
            for rank in helpers:
                if not self._is_in_it(rank, told):
                    return f"engine {self.engine.name} is in a group that rank {rank} has left"
            return None
        self.close()
        rank = 1 + len(helpers)
        if 0 in helpers:
            own = 1 + helpers.index(0)
            return await self._meet(
                lambda: WeightGroup(place, own, device=self._device), place, rank
            )
        limit = min(self._timeout_s, GROUP_JOIN_S)
        return await asked(self.engine, "join_group", lambda e: e.join_group(place, rank), limit)

    def _is_in_it(self, rank: int, told: Mapping[int, str]) -> bool:
        if rank:
            return read_place(told, rank, self.engine.name) is None
        return self._both_are_in_it

    def _start_sending(self, flat: Tensor) -> Future[None] | None:
        return None if self.group is None else self.group.start_passing_on(flat.numel())


def read_place(told: Mapping[int, str], rank: int, engine: str) -> GroupAddress | str | None:
    """Read where a rank meets an engine.

    Args:
        told: what `RankSender.open` returned on each rank.

    Returns None where the rank's last group with it is whole, and a string where it has none, which
    says why.
    """
    said = told.get(rank, "")
    try:
        place = json.loads(said)[engine]
        if isinstance(place, str):
            return f"engine {engine} cannot be met by rank {rank}: {place}"
        return None if place is None else GroupAddress(**place)
    except (ValueError, TypeError, KeyError):
        return f"rank {rank} told no place for engine {engine}: {said[:80]!r}"
