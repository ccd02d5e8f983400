"""Engines in other processes take each bucket over process groups (process_group.py).

Each engine has its own group with one rank of the trainer, which sends it every bucket, and with
the ranks that help the sender (groups/assignment.py). All ranks send at once. A hung engine blocks
only its sender, and only until the publication has failed.

An engine that queues calls is called for a bucket when the previous one begins to leave, so that it
takes the next bucket without a round trip. A failure therefore shows at a later bucket, or in
`complete`, and each engine that has not failed receives all buckets for which it was called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlcore.errors import EngineFailed
from rlcore.interfaces import Orders
from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, Transport, ask
from rollout.weight_sync.digests import new_order
from rollout.weight_sync.groups.assignment import SenderAssignment
from rollout.weight_sync.groups.link import EngineLink, Order
from rollout.weight_sync.process_group import choose_backend

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
        self._links: dict[Engine, EngineLink] = {}
        self._assignment = SenderAssignment(senders, rails)
        # The current transaction.
        self._orders: dict[Engine, Order] = {}
        self._digests: dict[str, str] = {}  # kind -> order of its digest
        self._buckets: Sequence[Bucket] = ()
        self._failed: Failures = {}

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Assign engines to ranks. Engines keep their groups unless they were started again."""
        for engine in [engine for engine, link in self._links.items() if not link.is_whole]:
            del self._links[engine]
        if self.has_all_engines:
            self._assignment.keep_only(engines)
        new = [engine for engine in engines if engine not in self._links]
        answers = await ask(new, "health", lambda e: e.health(), self._probe_s)
        self._failed = answers.failed
        self._orders = {}
        # An engine that has just joined may be alone in this transaction.
        known = len({*self._assignment.served, *engines})
        for engine in engines:
            if engine in self._failed:
                continue
            try:
                if engine not in self._links:
                    self._links[engine] = self._new_link(engine, answers.results[engine], known)
                self._orders[engine] = self._links[engine].order()
            except EngineFailed as error:  # recovery: without this engine, by the caller
                self._failed[engine] = f"engine {engine.name} cannot be reached: {error}"
        self._engines = [*self._orders]
        self._buckets = buckets
        kinds = {kind for engine in self._engines if (kind := self._kind(engine))}
        self._digests = {kind: new_order(kind) for kind in sorted(kinds)}
        return self._failed

    def _new_link(self, engine: Engine, health: Mapping[str, Any], known: int) -> EngineLink:
        if not getattr(engine, "digests_weights", False):
            logger.warning(NOT_VERIFIED, engine.name)
        served = self._assignment.assign(engine, health["gpu"], known, self.ranks)
        backend = choose_backend(self.ranks[served.sender].gpu, health["gpu"])
        return EngineLink(engine, backend, served, self._timeout_s)

    def orders(self) -> Orders:
        """Order ranks to send to engines or to help, and rank 0 to digest its buckets."""
        served: dict[int, list[dict[str, Any]]] = {0: []}
        for order in self._orders.values():
            for group_rank, rank in enumerate(order.trainer):
                served.setdefault(rank, []).append(asdict(replace(order, rank=group_rank)))
        known = [engine.name for engine in self._links]
        orders = {
            rank: {"engines": engines, "known": known, "digests": []}
            for rank, engines in served.items()
        }
        orders[0]["digests"] = [*self._digests.values()]
        return Orders(self.name, orders, joins=True)

    async def join(self, answers: Mapping[int, Any]) -> Failures:
        """Have engines enter the groups that ranks have opened for them.

        From then on rank 0 serves an engine that fails to join.
        """
        failed = await self._on_links(lambda link: link.join(answers))
        for engine in failed:
            if self._links.pop(engine).served.sender:
                self._assignment.leave_to_rank0(engine)
        return failed

    async def send(self, index: int, packed: Mapping[int, Any]) -> Failures:
        """Call the engines for the bucket and the next one."""
        called = [one.index for one in self._buckets[index : index + 2]]
        return await self._on_links(lambda link: link.send(called, self._order(link.engine)))

    def stop(self) -> dict[str, int]:
        """Return the last bucket for which each engine was called; see `Order.is_sent`."""
        return {engine.name: self._links[engine].last for engine in self._left()}

    async def complete(self, result: Mapping[str, str]) -> Failures:
        """Compare the digests of the received bytes with those of the sent bytes."""
        failed = await self._on_links(lambda link: link.drain())
        if failed:
            return failed
        asked = [engine for engine in self._engines if self._kind(engine)]
        what = "received_digests"
        answers = await ask(asked, what, lambda e: e.received_digests(), self._timeout_s)
        failed = answers.failed
        for engine, received in answers.results.items():
            why = difference(result[str(self._order(engine))], received, engine.group_ranks)
            if why is not None:
                failed[engine] = f"engine {engine.name}: {why}"
        self._failed |= failed
        return failed

    async def give_up(self) -> Failures:
        """Wait until the remaining engines have answered their calls. More of them may fail."""
        self._engines = self._left()
        return await self._on_links(lambda link: link.drain())

    def _left(self) -> list[Engine]:
        return [engine for engine in self._engines if engine not in self._failed]

    def _kind(self, engine: Engine) -> str | None:
        """The kind of digest that the engine computes; None if it computes none."""
        if not getattr(engine, "digests_weights", False):
            return None
        return "linear" if self._links[engine].backend == "nccl" else "xxh3"

    def _order(self, engine: Engine) -> str | None:
        kind = self._kind(engine)
        return None if kind is None else self._digests[kind]

    async def _on_links(self, step: Callable[[EngineLink], Any]) -> Failures:
        """Take a step on each link. Records and returns the engines that failed."""
        reasons = await asyncio.gather(*(step(self._links[engine]) for engine in self._engines))
        failed = {engine: why for engine, why in zip(self._engines, reasons) if why is not None}
        self._failed |= failed
        return failed


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
