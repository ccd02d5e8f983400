"""Engines in other processes take each bucket over process groups (process_group.py).

Each engine has its own group with one rank of the trainer, which sends it every bucket, and with
the ranks that help the sender (assignment.py). All ranks send at once. A hung engine blocks
only its sender, and only until the publication has failed.

An engine that queues calls is called for a bucket when the previous one begins to leave, so that it
takes the next bucket without a round trip. A failure therefore shows at a later bucket, or in
`complete`, and each engine that has not failed receives all buckets for which it was called.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlcore.deadlines import CANCEL_S, ENGINE_GRACE_S, GROUP_JOIN_S
from rlcore.errors import EngineFailed
from rlcore.interfaces import Orders
from rlcore.weights import Bucket
from rollout.weight_sync.assignment import SenderAssignment
from rollout.weight_sync.base import CALLS_AT_ONCE, Engine, Failures, Transport, ask, describe
from rollout.weight_sync.digests import new_order
from rollout.weight_sync.process_group import Backend, choose_backend
from rollout.weight_sync.sender import Order, read_address

NOT_LOADED = "not loaded: "  # SGLang's ranks send this with a reason, instead of a digest
NOT_VERIFIED = (
    "the weights that engine %s receives are not verified: it computes no digests; start it by"
    " `rlcore engine`, whose servers do"
)
logger = logging.getLogger(__name__)


class DistributedTransport(Transport):
    """Broadcasts the weights in a group with each engine, which has these members:

        url           its address; the route to it selects our address that it can reach
        group_ranks   the number of its own ranks in the group: its tensor-parallel ranks
        in_group      the name of its group; None again after a start or a new connection
        join_group(address, rank)
                      leaves its group and enters another, with the ranks from `rank` on; returns
                      when all ranks of the group have joined
        receive_bucket(index, None)
                      receives bucket `index` over the group, and loads it
        health()      has under `gpu` the identity of its GPU; None stands for the CPU, and for a
                      GPU that it shares with the trainer

    If its `digests_weights` is true, it also has `receive_bucket(index, None, order)`, for a digest
    of all bytes that it receives (digests.py), and `received_digests()`, the digests of its ranks
    since `begin_update`, in their order. If its `queues_buckets` is true, it takes calls of
    `receive_bucket` for later buckets while it receives one, and receives in the order of the
    indices, in whatever order the calls arrive; a call made ahead has `CALLS_AT_ONCE` times its
    limit.

    Args:
        senders, rails: see `SenderAssignment`.
    """

    name = "distributed"

    def __init__(
        self,
        *,
        timeout_s: float,
        probe_s: float,
        senders: int | None = None,
        rails: int | None = None,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._probe_s = probe_s
        self._assignment = SenderAssignment(senders, rails)
        # also of engines outside the transaction
        self._links: dict[Engine, EngineLink] = {}
        # The current transaction.
        self._orders: list[Order] = []
        # kind -> order of its digest
        self._digests: dict[str, str] = {}
        self._buckets: Sequence[Bucket] = ()
        self._failed: Failures = {}

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Assign engines to ranks. Engines keep their groups unless they were started again."""
        # The ranks report in `join` which groups they have left.
        self._links = {
            engine: link for engine, link in self._links.items() if engine.in_group is not None
        }
        if self.has_all_engines:
            self._assignment.keep_only(engines)
        new = [engine for engine in engines if engine not in self._links]
        answers = await ask(new, "health", lambda e: e.health(), self._probe_s)
        self._failed = answers.failed
        self._engines = []
        self._orders = []
        self._digests = {}
        self._buckets = buckets
        # An engine that has just joined may be alone in this transaction.
        known = len({*self._assignment.served, *engines})
        for engine in [engine for engine in engines if engine not in self._failed]:
            try:
                if engine not in self._links:
                    gpu = answers.results[engine]["gpu"]
                    ranks = self._assignment.assign(engine, gpu, known, self.ranks)
                    backend = choose_backend(self.ranks[ranks[0]].gpu, gpu)
                    self._links[engine] = EngineLink(engine, backend, ranks, self._timeout_s)
                self._orders.append(self._links[engine].begin(self._digests))
                self._engines.append(engine)
            # recovery: without this engine, by the caller
            except EngineFailed as error:
                self._failed[engine] = f"engine {engine.name} cannot be reached: {error}"
        return self._failed

    def orders(self) -> Orders:
        """Order ranks to send to engines or to help, and rank 0 to digest its buckets."""
        served: dict[int, list[dict[str, Any]]] = {0: []}
        for order in self._orders:
            for group_rank, rank in enumerate(order.trainer):
                served.setdefault(rank, []).append(asdict(replace(order, rank=group_rank)))
        known: dict[int, list[str]] = {rank: [] for rank in served}
        for engine, link in self._links.items():
            for rank in known.keys() & link.ranks:
                known[rank].append(engine.name)
        orders = {
            rank: {"engines": engines, "known": known[rank], "digests": []}
            for rank, engines in served.items()
        }
        orders[0]["digests"] = [*self._digests.values()]
        enters: dict[int, list[int]] = {}
        for order in self._orders:
            for helper in order.trainer[1:]:
                enters.setdefault(helper, []).append(order.trainer[0])
        return Orders(self.name, orders, joins=True, enters=enters)

    async def join(self, answers: Mapping[int, Any]) -> Failures:
        """Have engines enter the groups that ranks have opened for them.

        From then on rank 0 serves an engine that fails to join.
        """
        failed = await self._on_links(lambda link: link.join(answers))
        for engine in failed:
            if self._links.pop(engine).ranks[0]:
                self._assignment.leave_to_rank0(engine)
        return failed

    async def send(self, index: int, packed: Mapping[int, Any]) -> Failures:
        """Call the engines for the bucket and the next one."""
        called = [one.index for one in self._buckets[index : index + 2]]
        return await self._on_links(lambda link: link.send(called))

    def stop(self) -> dict[str, int]:
        """Return the last bucket for which each engine was called; see `Order.is_sent`."""
        return {engine.name: self._links[engine].last for engine in self._left()}

    async def complete(self, result: Mapping[str, str]) -> Failures:
        """Compare the digests of the received bytes with those of the sent bytes."""
        failed = await self._on_links(lambda link: link.drain())
        if failed:
            return failed
        sent = {
            engine: result[order]
            for engine in self._engines
            if (order := self._links[engine].digest) is not None
        }
        answers = await ask(
            [*sent], "received_digests", lambda e: e.received_digests(), self._timeout_s
        )
        failed = answers.failed
        for engine, received in answers.results.items():
            if (why := difference(sent[engine], received, engine.group_ranks)) is not None:
                failed[engine] = f"engine {engine.name}: {why}"
        self._failed |= failed
        return failed

    async def give_up(self) -> Failures:
        """Wait until the remaining engines have answered their calls. More of them may fail."""
        self._engines = self._left()
        return await self._on_links(lambda link: link.drain())

    def _left(self) -> list[Engine]:
        return [engine for engine in self._engines if engine not in self._failed]

    async def _on_links(self, step: Callable[[EngineLink], Any]) -> Failures:
        """Take a step on each link. Records and returns the engines that failed."""
        reasons = await asyncio.gather(*(step(self._links[engine]) for engine in self._engines))
        failed = {engine: why for engine, why in zip(self._engines, reasons) if why is not None}
        self._failed |= failed
        return failed


class EngineLink:
    """The engines' side of the process group of an engine and trainer ranks.

    An engine that queues calls (`queues_buckets`) is also called for the next bucket, and has up to
    `CALLS_AT_ONCE` calls. Other engines have one call, so that no two calls can change their order.

    The coroutines return why the engine failed, or None.

    Args:
        ranks: the trainer's ranks in the group, the sender first.
        timeout_s: the limit for one bucket, counted from when its answer is due: until then,
            another engine may hold up the sender.
    """

    def __init__(
        self, engine: Engine, backend: Backend, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self.engine = engine
        self.backend = backend
        self.ranks = ranks
        # The order of the digest that the engine computes in this publication, if it can.
        self.digest: str | None = None
        self._timeout_s = timeout_s
        # Calls that are unfinished or unchecked, in the order of buckets.
        self._calls: list[asyncio.Task[str | None]] = []
        # The last bucket of this publication for which the engine was called.
        self.last = -1

        if not getattr(engine, "digests_weights", False):
            logger.warning(NOT_VERIFIED, engine.name)

    def begin(self, digests: dict[str, str]) -> Order:
        """Begin a publication. Raises EngineFailed if the engine has lost its address.

        Args:
            digests: kind -> order of its digest, to which the engine's own kind is added.
        """
        self.last = -1
        engine = self.engine
        order = Order(
            engine.name, engine.url, engine.group_ranks, self.backend, engine.in_group, self.ranks
        )
        if getattr(engine, "digests_weights", False):
            kind = "linear" if self.backend == "nccl" else "xxh3"
            self.digest = digests.setdefault(kind, new_order(kind))
        return order

    async def join(self, answers: Mapping[int, Any]) -> str | None:
        """Have the engine enter the group that its sender has opened.

        Args:
            answers: the results of `GroupSender.open`, by rank.
        """
        engine = self.engine
        address = read_address(answers, self.ranks[0], engine.name)
        if isinstance(address, str):
            return address
        # The sender still has its last group with the engine.
        if address is None:
            for rank in self.ranks[1:]:
                if read_address(answers, rank, engine.name) is not None:
                    return f"engine {engine.name} is in a group that rank {rank} has left"
            return None
        joined = await ask(
            [engine],
            "join_group",
            lambda e: e.join_group(address, len(self.ranks)),
            min(self._timeout_s, GROUP_JOIN_S),
        )
        return joined.failed.get(engine)

    async def send(self, indices: Sequence[int]) -> str | None:
        """Call the engine once for each bucket. Returns when it can take the next call.

        Args:
            indices: a bucket and the next one.
        """
        queues = bool(getattr(self.engine, "queues_buckets", False))
        for index in indices[: 2 if queues else 1]:
            if index > self.last:
                self._calls.append(asyncio.ensure_future(self._call(index)))
                self.last = index
        return await self.drain(CALLS_AT_ONCE - 1 if queues else 0)

    async def _call(self, index: int) -> str | None:
        ordered = () if self.digest is None else (self.digest,)
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


def difference(sent: str, received: Sequence[str], ranks: int) -> str | None:
    """Describe how the digests of an engine's ranks differ from the sent one; None if equal."""
    if len(received) != ranks:
        return f"digests of {len(received)} ranks, expected {ranks}"
    for rank, digest in enumerate(received):
        if digest.startswith(NOT_LOADED):
            return f"its rank {rank} received the weights, but did not load them: {digest}"
        if digest != sent:
            return (
                f"its rank {rank} did not receive the weights as they were sent: something between"
                f" trainer and engine changes them (digest sent {sent[:12]}, received"
                f" {digest[:12] or 'none'})"
            )
    return None
