"""The calls by which an engine takes buckets over a process group with ranks of the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.deadlines import CANCEL_S, ENGINE_GRACE_S, GROUP_JOIN_S
from rlcore.weights import Bucket
from rollout.weight_sync.base import CALLS_AT_ONCE, Engine, ask, describe
from rollout.weight_sync.groups.assignment import Served
from rollout.weight_sync.process_group import Backend, GroupAddress


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
        """The ranks of the group without the one that sends."""
        return len(self.trainer) - 1 + self.ranks

    def is_sent(self, bucket: Bucket, stopped: Mapping[str, int] | None) -> bool:
        """Whether the engine still gets a bucket.

        Args:
            stopped: up to which bucket each engine was called in a publication that has failed. One
                that is out is not named. The others wait in a broadcast until they have that
                bucket: neither gloo nor NCCL lets them go.
        """
        return stopped is None or bucket.index <= stopped.get(self.engine, -1)


class EngineLink:
    """The process group of an engine and ranks of the trainer, as the engines' side sees it.

    An engine that queues calls (`queues_buckets`) is called for the bucket that follows, too, and
    has up to `CALLS_AT_ONCE` calls; another one has one, so that no two can overtake each other.

    Its coroutines return why the engine failed, or None.

    Args:
        timeout_s: for one bucket, from when its answer is waited for: before that, the rank that
            sends it may be held up by another engine.
    """

    def __init__(self, engine: Engine, backend: Backend, served: Served, timeout_s: float) -> None:
        self.engine = engine
        self.backend = backend
        self.served = served
        self._timeout_s = timeout_s
        # that are not known to have succeeded, in the order of buckets
        self._calls: list[asyncio.Task[str | None]] = []
        self.last = -1  # the bucket up to which the engine was called, in this publication

    @property
    def is_whole(self) -> bool:
        """Whether the engine was not started again. The ranks say in `join` whether they were."""
        return self.engine.in_group is not None

    def order(self) -> Order:
        """Begin a publication. Raises EngineFailed where the engine has no address any more."""
        self.last = -1
        engine = self.engine
        trainer = (self.served.sender, *self.served.helpers)
        return Order(
            engine.name, engine.url, engine.group_ranks, self.backend, engine.in_group, trainer
        )

    async def join(self, answers: Mapping[int, Any]) -> str | None:
        """Have the engine enter the group that its sender has opened.

        Args:
            answers: what `GroupSender.open` returned on each rank.
        """
        engine = self.engine
        address = read_address(answers, self.served.sender, engine.name)
        if isinstance(address, str):
            return address
        if address is None:  # the last group is whole, for its sender
            for rank in self.served.helpers:
                if read_address(answers, rank, engine.name) is not None:
                    return f"engine {engine.name} is in a group that rank {rank} has left"
            return None
        rank = 1 + len(self.served.helpers)
        limit = min(self._timeout_s, GROUP_JOIN_S)
        answers_of = await ask([engine], "join_group", lambda e: e.join_group(address, rank), limit)
        return answers_of.failed.get(engine)

    # --- buckets ----------------------------------------------------------------------------------

    async def send(self, indices: Sequence[int], order: str | None) -> str | None:
        """Call the engine for buckets, each once. Return when it has room for the next call.

        Args:
            indices: of a bucket, and of the one that follows.
            order: for a digest of what it receives.
        """
        queues = bool(getattr(self.engine, "queues_buckets", False))
        for index in indices[: 2 if queues else 1]:
            if index > self.last:
                self._calls.append(asyncio.ensure_future(self._call(index, order)))
                self.last = index
        return await self.drain(CALLS_AT_ONCE - 1 if queues else 0)

    async def _call(self, index: int, order: str | None) -> str | None:
        ordered = () if order is None else (order,)
        try:
            await self.engine.receive_bucket(index, None, *ordered)
        except Exception as error:  # noqa: BLE001 - recovery: without this engine, by the caller
            return describe(error)
        return None

    async def drain(self, most: int = 0) -> str | None:
        """Wait until at most `most` calls are unanswered."""
        oldest: asyncio.Task[str | None] | None = None
        deadline = 0.0
        while True:
            for call in self._calls:
                if call.done() and (why := call.result()) is not None:
                    return await self._drop(why)
            self._calls = [call for call in self._calls if not call.done()]
            if len(self._calls) <= most:
                return None
            if self._calls[0] is not oldest:
                oldest = self._calls[0]
                deadline = time.monotonic() + self._timeout_s + ENGINE_GRACE_S
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return await self._drop(
                    f"engine {self.engine.name} did not answer receive_bucket within"
                    f" {self._timeout_s:g} s (rollout.engine.update_timeout_s)"
                )
            await asyncio.wait(self._calls, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def _drop(self, why: str) -> str:
        """Leave no call behind. Returns `why`."""
        calls = [call for call in self._calls if call.cancel()]
        self._calls = []
        if calls:
            await asyncio.wait(calls, timeout=2 * CANCEL_S)
        return why


def read_address(answers: Mapping[int, Any], rank: int, engine: str) -> GroupAddress | str | None:
    """Read the rendezvous of a rank and an engine.

    Args:
        answers: what `GroupSender.open` returned on each rank.

    Returns None where the rank's last group with it is whole, and a string where it has none, which
    says why.
    """
    address = answers[rank][engine]
    if isinstance(address, str):
        return f"engine {engine} cannot be met by rank {rank}: {address}"
    return None if address is None else GroupAddress(**address)
