"""A rank of the trainer beside rank 0, as it sends weights to engines, or helps one that does.

It meets the engines that rank 0 names, and sends. A hung engine blocks it only until rank 0 gives
the publication up. A rank that helps (assignment.py) is in the group of another sender and an
engine. It waits for each bucket as the sender does: on a GPU, a rank ahead of the sender would
queue the trainer's next broadcast in front of this one, and the sender would wait for this one
before it joins that.
"""

from __future__ import annotations

import json
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
from rlcore.weights import Bucket
from rollout.weight_sync.groups.link import AHEAD, Order, Stop, read_place
from rollout.weight_sync.process_group import (
    GroupAddress,
    WeightGroup,
    close_late,
    gpu_identity,
    meeting_place,
    start_thread,
)

GIVEN_UP_POLL_S = 0.02  # how often a rank that waits for an engine looks whether rank 0 still does
logger = logging.getLogger(__name__)


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
        self._orders: list[Order] = []  # in the current publication

    def open(self, order: str) -> str:
        """See `BucketSender.open`."""
        self._orders = [Order(**one) for one in json.loads(order)]
        self._leave_meetings()  # of a publication that went no further
        return json.dumps({one.engine: self._open(one) for one in self._orders})

    def _open(self, order: Order) -> dict[str, Any] | str | None:
        """Open a group, unless the last one is whole. Returns what `meet` is told."""
        group = self._groups.get(order.engine)
        if group is not None and group.is_open and group.address.name == order.group:
            return None
        self._drop(order.engine)
        if order.rank:
            return "it has no group"  # until `enter`
        try:
            address, store = meeting_place(
                order.url, order.others, order.backend, AHEAD * self._timeout_s
            )
        except (OSError, dist.DistError) as error:  # recovery: without this engine, by rank 0
            return str(error)
        self._meet(order, address, store)
        return asdict(address)

    def _meet(self, order: Order, address: GroupAddress, store: dist.Store | None) -> None:
        """Wait in a thread for the others of a group."""
        self._meetings[order.engine] = start_thread(
            lambda: WeightGroup(address, order.rank, device=self._device, store=store),
            self._device,
        )

    def enter(self, places: Mapping[int, str]) -> None:
        """See `BucketSender.enter`."""
        for order in self._orders:
            place = read_place(places, order.trainer[0], order.engine)
            if order.rank and isinstance(place, GroupAddress):
                self._drop(order.engine)
                self._meet(order, place, None)

    def send(self, bucket: Bucket, flat: Tensor, given_up: Callable[[], str | None]) -> None:
        """See `BucketSender.send`."""
        stop = Stop.of(given_up())
        orders = [order for order in self._orders if stop.lets(order.engine, bucket)]
        if not orders:
            return
        self._end_meetings()
        began = time.monotonic()
        sending = self._start(orders, bucket, flat)
        while waiting := {one: done for one, done in sending.items() if not done.done()}:
            wait(waiting.values(), timeout=GIVEN_UP_POLL_S)
            stop = Stop.of(given_up())
            # one more that hangs: the ranks that serve nobody wait for us in their own broadcast
            hangs = stop.last is not None and time.monotonic() - began > self._timeout_s
            for engine in waiting:
                if hangs or not stop.lets(engine, bucket):
                    self._drop(engine)  # what is half sent ends with its group
                    del sending[engine]
        for engine, done in sending.items():
            if (error := done.exception()) is not None:
                self._fail(engine, f"bucket {bucket.index} was not sent: {error}")

    def _start(
        self, orders: Sequence[Order], bucket: Bucket, flat: Tensor
    ) -> dict[str, Future[None]]:
        """Start to send a bucket to engines, or to pass it on."""
        sending: dict[str, Future[None]] = {}
        for order in orders:
            group = self._groups.get(order.engine)
            if group is None:  # it failed at an earlier bucket
                continue
            try:
                sending[order.engine] = (
                    group.start_passing_on(flat.numel())
                    if order.rank
                    else group.start_sending(flat)
                )
            except RunFailed as error:
                self._fail(order.engine, f"bucket {bucket.index} was not sent: {error}")
        return sending

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
        for order in self._orders:
            self._drop(order.engine)
        self._leave_meetings()

    def close(self) -> None:
        """See `BucketSender.close`."""
        for engine in [*self._groups]:
            self._drop(engine)
        self._leave_meetings()
