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
    """An order for a rank to serve an engine, as its sender or as a helper."""

    engine: str
    url: str
    ranks: int  # number of the engine's own ranks in the group
    backend: Backend
    group: str | None  # name of the engine's current group
    trainer: Sequence[int]  # the trainer's ranks in the group, the sender first
    rank: int = 0  # the recipient's rank in the group

    @property
    def others(self) -> int:
        """The number of ranks in the group, without the sender."""
        return len(self.trainer) - 1 + self.ranks

    def is_sent(self, bucket: Bucket, stopped: Mapping[str, int] | None) -> bool:
        """Whether the engine still gets a bucket.

        Args:
            stopped: after a failure, the last bucket for which each remaining engine was called. An
                engine waits in a broadcast until it has that bucket: neither gloo nor NCCL can
                cancel the wait.
        """
        return stopped is None or bucket.index <= stopped.get(self.engine, -1)


class EngineLink:
    """The engines' side of the process group of an engine and trainer ranks.

    An engine that queues calls (`queues_buckets`) is also called for the next bucket, and has up to
    `CALLS_AT_ONCE` calls. Other engines have one call, so that no two calls can change their order.

    The coroutines return why the engine failed, or None.

    Args:
        timeout_s: the limit for one bucket, counted from when its answer is due: until then,
            another engine may hold up the sender.
    """

    def __init__(self, engine: Engine, backend: Backend, served: Served, timeout_s: float) -> None:
        self.engine = engine
        self.backend = backend
        self.served = served
        self._timeout_s = timeout_s
        # Calls that are unfinished or unchecked, in the order of buckets.
        self._calls: list[asyncio.Task[str | None]] = []
        # The last bucket of this publication for which the engine was called.
        self.last = -1

    @property
    def is_whole(self) -> bool:
        """Whether the engine is still in its group. The ranks report their side in `join`."""
        return self.engine.in_group is not None

    def order(self) -> Order:
        """Begin a publication. Raises EngineFailed if the engine has lost its address."""
        self.last = -1
        engine = self.engine
        trainer = (self.served.sender, *self.served.helpers)
        return Order(
            engine.name, engine.url, engine.group_ranks, self.backend, engine.in_group, trainer
        )

    async def join(self, answers: Mapping[int, Any]) -> str | None:
        """Have the engine enter the group that its sender has opened.

        Args:
            answers: the results of `GroupSender.open`, by rank.
        """
        engine = self.engine
        address = read_address(answers, self.served.sender, engine.name)
        if isinstance(address, str):
            return address
        # The sender still has its last group with the engine.
        if address is None:
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
        """Call the engine once for each bucket. Returns when it can take the next call.

        Args:
            indices: a bucket and the next one.
            order: of a digest of the received bytes.
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
        """Cancel all calls. Returns `why`."""
        calls = [call for call in self._calls if call.cancel()]
        self._calls = []
        if calls:
            await asyncio.wait(calls, timeout=2 * CANCEL_S)
        return why


def read_address(answers: Mapping[int, Any], rank: int, engine: str) -> GroupAddress | str | None:
    """Read the rendezvous of a rank and an engine.

    Args:
        answers: the results of `GroupSender.open`, by rank.

    Returns None if the rank still has its last group with the engine, or the reason as a string if
    it has no rendezvous.
    """
    address = answers[rank][engine]
    if isinstance(address, str):
        return f"rank {rank} cannot open a group with engine {engine}: {address}"
    return None if address is None else GroupAddress(**address)
