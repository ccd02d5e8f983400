"""A trainer rank that sends weights to engines over process groups, or helps a sender.

The rank makes a group with each engine that it is ordered to serve, and sends. A hung engine blocks
the rank only until the publication has failed. A helper (assignment.py) is in the group of another
sender and an engine. It waits for each bucket as the sender does: on a GPU, a helper ahead of the
sender would queue the trainer's next broadcast before the current one, while the sender waits for
the current one first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.deadlines import GROUP_JOIN_S
from rlcore.errors import RunFailed
from rlcore.interfaces import BucketSender
from rlcore.weights import Bucket
from rollout.weight_sync.digests import Digest
from rollout.weight_sync.process_group import (
    Backend,
    GroupAddress,
    WeightGroup,
    close_late,
    open_rendezvous,
    start_thread,
)

STOPPED_POLL_S = 0.02  # interval at which a waiting rank looks for a failure elsewhere
# Factor on the limit of broadcasts, so that the deadline of an engine's answer passes first.
# Engines and ranks may be a bucket ahead of each other, and then wait that long.
BROADCAST_LIMIT_FACTOR = 3.0
logger = logging.getLogger(__name__)


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

    def is_sent(self, bucket: Bucket, stopped: Mapping[str, int] | None) -> bool:
        """Whether the engine still gets a bucket.

        Args:
            stopped: after a failure, the last bucket for which each remaining engine was called. An
                engine waits in a broadcast until it has that bucket: neither gloo nor NCCL can
                cancel the wait.
        """
        return stopped is None or bucket.index <= stopped.get(self.engine, -1)


class GroupSender(BucketSender):
    """Sends over a process group with each engine. Rank 0 also digests the buckets.

    Args:
        timeout_s: the limit for one bucket (`rollout.engine.update_timeout_s`).
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        # by engine
        self._groups: dict[str, WeightGroup] = {}
        self._joining: dict[str, Future[WeightGroup]] = {}
        # The current publication.
        self._orders: list[Order] = []
        self._digests: list[Digest] = []
        # engine -> newest bucket whose sending has begun
        self._sent: dict[str, int] = {}

    def open(self, order: Mapping[str, Any], buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Begin a publication. Returns the rendezvous with each engine; see `read_address`.

        Args:
            order: made by `DistributedTransport.orders`.
        """
        self._orders = [Order(**one) for one in order["engines"]]
        self._digests = [Digest(one) for one in order["digests"]]
        self._sent = {}
        # A cancelled publication may have left groups that are joining.
        self._leave_joining()
        for engine in self._groups.keys() - order["known"]:
            self._drop(engine)
        return {one.engine: self._open(one) for one in self._orders}

    def _open(self, order: Order) -> dict[str, Any] | str | None:
        """Open a group, unless the last one is still open."""
        group = self._groups.get(order.engine)
        if group is not None and group.is_open and group.address.name == order.group:
            return None
        self._drop(order.engine)
        if order.rank:
            # A helper joins its group in `enter`.
            return "it has no group"
        try:
            address, store = open_rendezvous(
                order.url,
                len(order.trainer) - 1 + order.ranks,
                order.backend,
                BROADCAST_LIMIT_FACTOR * self._timeout_s,
            )
        # recovery: without this engine, by the caller
        except (OSError, dist.DistError) as error:
            return str(error)
        self._join(order, address, store)
        return asdict(address)

    def _join(self, order: Order, address: GroupAddress, store: dist.Store | None) -> None:
        """Join a group in a thread, which waits for the other ranks."""
        self._joining[order.engine] = start_thread(
            lambda: WeightGroup(address, order.rank, device=self._device, store=store), self._device
        )

    def enter(self, answers: Mapping[int, Any]) -> None:
        """Join the groups of the ranks that this one helps."""
        for order in self._orders:
            if not order.rank:
                continue
            address = read_address(answers, order.trainer[0], order.engine)
            if isinstance(address, GroupAddress):
                self._drop(order.engine)
                self._join(order, address, None)

    def send(self, bucket: Bucket, flat: Tensor, stopped: Callable[[], Any]) -> None:
        """Send the bucket to the engines that this rank serves, or pass it on.

        A failing engine gets no further buckets; the engines' side sees the failure by itself.
        """
        before = stopped()
        orders = [order for order in self._orders if order.is_sent(bucket, before)]
        if before is not None and not orders:
            return
        self._end_joining()
        if orders and all(order.backend == "gloo" for order in orders):
            # Copy to the host once for all groups.
            flat = flat.cpu()
        began = time.monotonic()
        sending = {order.engine: self._start(order, bucket, flat) for order in orders}
        if before is None:
            for digest in self._digests:
                digest.add(flat)
                digest.wait()
        while waiting := [one for one in orders if not sending[one.engine].done()]:
            wait([sending[one.engine] for one in waiting], timeout=STOPPED_POLL_S)
            last = stopped()
            # Another engine hangs after a failure. Drop it, because the ranks without engines wait
            # for this rank in the trainer's next broadcast.
            hangs = last is not None and time.monotonic() - began > self._timeout_s
            for order in waiting:
                if hangs or not order.is_sent(bucket, last):
                    # Closing the group ends its unfinished broadcast.
                    self._drop(order.engine)
                    orders.remove(order)
        for order in orders:
            if (error := sending[order.engine].exception()) is not None:
                self._fail(order.engine, f"bucket {bucket.index} was not sent: {error}")

    def _start(self, order: Order, bucket: Bucket, flat: Tensor) -> Future[None]:
        """Start to send a bucket to an engine, or to pass it on."""
        group = self._groups.get(order.engine)
        # An engine that failed at an earlier bucket has no group.
        if group is not None:
            self._sent[order.engine] = bucket.index
            try:
                if order.rank:
                    return group.start_passing_on(flat.numel())
                return group.start_sending(flat)
            except RunFailed as error:
                self._fail(order.engine, f"bucket {bucket.index} was not sent: {error}")
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing

    def finish(self) -> dict[str, str]:
        """Return the digests of the sent bytes, by their orders."""
        return {digest.order: digest.read() for digest in self._digests}

    def _end_joining(self) -> None:
        """Wait for the groups that are joining; their engines have joined already."""
        for engine, joining in self._joining.items():
            try:
                self._groups[engine] = joining.result(min(self._timeout_s, GROUP_JOIN_S))
            except (RunFailed, TimeoutError) as error:
                joining.add_done_callback(close_late)
                self._fail(engine, str(error))
        self._joining = {}

    def _leave_joining(self) -> None:
        for joining in self._joining.values():
            joining.add_done_callback(close_late)
        self._joining = {}

    def _fail(self, engine: str, why: str) -> None:
        """Recovery: the engine's own call fails too, and the publication continues without it."""
        logger.warning("engine %s is not served any more: %s", engine, why)
        self._drop(engine)

    def _drop(self, engine: str) -> None:
        if (group := self._groups.pop(engine, None)) is not None:
            group.close()

    def end(self, *, done: bool, stopped: Mapping[str, int] | None) -> None:
        """Keep the groups whose engines received all that was sent.

        NCCL completes a small broadcast that the other side did not receive, so the next one would
        be off by one. A group with helpers is closed, because its ranks may disagree.
        """
        if done:
            return
        for order in self._orders:
            sent = self._sent.get(order.engine, -1)
            if len(order.trainer) > 1 or sent != (stopped or {}).get(order.engine, -1):
                self._drop(order.engine)
        self._leave_joining()

    def close(self) -> None:
        """Close the connections."""
        for engine in [*self._groups]:
            self._drop(engine)
        self._leave_joining()


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
