"""A rank of the trainer that sends weights to engines over process groups, or helps one that does.

It makes a group with each engine that it is ordered to serve, and sends. A hung engine blocks it
only until the publication has failed. A rank that helps (assignment.py) is in the group of another
sender and an engine. It waits for each bucket as the sender does: on a GPU, a rank ahead of the
sender would queue the trainer's next broadcast in front of this one, and the sender would wait for
this one before it takes part in that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.deadlines import GROUP_JOIN_S
from rlcore.errors import RunFailed
from rlcore.interfaces import BucketSender
from rlcore.weights import Bucket
from rollout.weight_sync.digests import Digest
from rollout.weight_sync.groups.link import Order, read_address
from rollout.weight_sync.process_group import (
    GroupAddress,
    WeightGroup,
    close_late,
    open_rendezvous,
    start_thread,
)

STOPPED_POLL_S = 0.02  # how often a rank that waits for an engine looks for a failure elsewhere
# An engine waits for a bucket while another one holds up the bucket before, and this rank may begin
# one while another rank waits for that. The deadline of broadcasts comes later, so that the one
# for an engine's answer counts.
AHEAD = 3.0
logger = logging.getLogger(__name__)


class GroupSender(BucketSender):
    """Sends over a process group with each engine. Rank 0 also digests the buckets.

    Args:
        timeout_s: for one bucket (`rollout.engine.update_timeout_s`).
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[str, WeightGroup] = {}  # by engine
        self._joining: dict[str, Future[WeightGroup]] = {}
        # in the current publication
        self._orders: list[Order] = []
        self._digests: list[Digest] = []
        self._sent: dict[str, int] = {}  # by engine, the newest bucket that was begun

    def open(self, order: Mapping[str, Any], buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Begin a publication. Returns the rendezvous with each engine; see `read_address`.

        Args:
            order: of `DistributedTransport.orders`.
        """
        self._orders = [Order(**one) for one in order["engines"]]
        self._digests = [Digest(one) for one in order["digests"]]
        self._sent = {}
        self._leave_joining()  # of a publication that went no further
        for engine in self._groups.keys() - order["known"]:
            self._drop(engine)
        return {one.engine: self._open(one) for one in self._orders}

    def _open(self, order: Order) -> dict[str, Any] | str | None:
        """Open a group, unless the last one is whole."""
        group = self._groups.get(order.engine)
        if group is not None and group.is_open and group.address.name == order.group:
            return None
        self._drop(order.engine)
        if order.rank:
            return "it has no group"  # until `enter`
        try:
            address, store = open_rendezvous(
                order.url, order.others, order.backend, AHEAD * self._timeout_s
            )
        except (OSError, dist.DistError) as error:  # recovery: without this engine, by the caller
            return str(error)
        self._join(order, address, store)
        return asdict(address)

    def _join(self, order: Order, address: GroupAddress, store: dist.Store | None) -> None:
        """Wait in a thread for the others of a group."""
        self._joining[order.engine] = start_thread(
            lambda: WeightGroup(address, order.rank, device=self._device, store=store),
            self._device,
        )

    def enter(self, answers: Mapping[int, Any]) -> None:
        """Meet the ranks that this one helps."""
        for order in self._orders:
            address = read_address(answers, order.trainer[0], order.engine)
            if order.rank and isinstance(address, GroupAddress):
                self._drop(order.engine)
                self._join(order, address, None)

    def send(self, bucket: Bucket, flat: Tensor, stopped: Callable[[], Any]) -> None:
        """Send the bucket to the engines that this rank serves, or pass it on.

        An engine that fails is left out from there on; the engines' side hears of it from itself.
        """
        before = stopped()
        orders = [order for order in self._orders if order.is_sent(bucket, before)]
        if before is not None and not orders:
            return
        self._end_joining()
        if orders and all(order.backend == "gloo" for order in orders):
            flat = flat.cpu()  # copied once for all
        began = time.monotonic()
        sending = {order.engine: self._start(order, bucket, flat) for order in orders}
        if before is None:
            for digest in self._digests:
                digest.add(flat)
                digest.wait()
        while waiting := [one for one in orders if not sending[one.engine].done()]:
            wait([sending[one.engine] for one in waiting], timeout=STOPPED_POLL_S)
            last = stopped()
            # one more that hangs: the ranks that serve nobody wait for us in their own broadcast
            hangs = last is not None and time.monotonic() - began > self._timeout_s
            for order in waiting:
                if hangs or not order.is_sent(bucket, last):
                    self._drop(order.engine)  # what is half sent ends with its group
                    orders.remove(order)
        for order in orders:
            if (error := sending[order.engine].exception()) is not None:
                self._fail(order.engine, f"bucket {bucket.index} was not sent: {error}")

    def _start(self, order: Order, bucket: Bucket, flat: Tensor) -> Future[None]:
        """Start to send a bucket to an engine, or to pass it on."""
        group = self._groups.get(order.engine)
        if group is not None:  # else it failed at an earlier bucket
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
        """Return the digests of what was sent, by their orders."""
        return {digest.order: digest.read() for digest in self._digests}

    def _end_joining(self) -> None:
        """Take the groups that have come together: the engines have said so."""
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
        """Recovery: the engine fails too, and the publication goes on without it."""
        logger.warning("engine %s is not served any more: %s", engine, why)
        self._drop(engine)

    def _drop(self, engine: str) -> None:
        if (group := self._groups.pop(engine, None)) is not None:
            group.close()

    def end(self, *, done: bool, stopped: Mapping[str, int] | None) -> None:
        """Keep the groups whose engines received all that was sent.

        NCCL takes a small broadcast that nobody receives: the next one would be off by one. The
        ranks of a group that has helpers may not know the same, and leave it.
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
