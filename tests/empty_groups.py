"""Ranks that send to engines, but no bytes: their orders and rendezvous are those of a run."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rollout.weight_sync.process_group import GroupAddress
from rollout.weight_sync.sender import GroupSender, Order


class EmptyGroup:
    """The group of a sender and an engine, in which nothing is sent."""

    is_open = True

    def __init__(self, address: GroupAddress, store: dist.Store | None) -> None:
        self.address = address
        self._store = store

    def start_sending(self, flat: Tensor) -> Future[None]:
        return done(None)

    def start_passing_on(self, num_bytes: int) -> Future[None]:
        return done(None)

    def close(self) -> None:
        self.is_open = False


class EmptySender(GroupSender):
    """Opens rendezvous, and keeps groups, as a sender does."""

    def _join(self, order: Order, address: GroupAddress, store: dist.Store | None) -> None:
        self._joining[order.engine] = done(EmptyGroup(address, store))


def done(value: Any) -> Future[Any]:
    found: Future[Any] = Future()
    found.set_result(value)
    return found
