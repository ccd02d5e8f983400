"""Engines that join whatever they are told to, and groups that note what they are asked to do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from rollout.weight_sync.process_group import GroupAddress, WorkThread
from rollout.weight_sync.sender import Order

CPU = torch.device("cpu")
ADDRESS = {
    "host": "10.0.0.2", "port": 4000, "world_size": 3, "backend": "gloo", "timeout_s": 5.0,
    "name": "weights-a",
}  # fmt: skip
FLAT = torch.zeros(8, dtype=torch.uint8)


class Engine:
    """Joins whatever it is told to."""

    def __init__(self, name: str = "engine-0", url: str = "http://10.0.0.9:30000") -> None:
        self.name = name
        self.url = url
        self.group_ranks = 2
        self.in_group: str | None = None
        self.joined: list[tuple[GroupAddress, int]] = []

    async def health(self) -> dict[str, Any]:
        return {"gpu": None}

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        self.joined.append((address, rank))
        self.in_group = address.name


class Group:
    """Notes what it is asked to do."""

    made: ClassVar[list[Group]] = []

    def __init__(self, address: GroupAddress, rank: int, **_: Any) -> None:
        self.address = address
        self.rank = rank
        self.is_open = True
        self.passed_on: list[Future[None]] = []
        Group.made.append(self)

    def start_passing_on(self, num_bytes: int) -> Future[None]:
        self.passed_on.append(Future())
        return self.passed_on[-1]

    def close(self) -> None:
        self.is_open = False


def group(send: Callable[[], Any], close: Callable[[], Any] = lambda: None) -> Any:
    """A group that does this."""
    thread = WorkThread(CPU)
    return SimpleNamespace(
        start_sending=lambda flat: thread.start(send),
        start_passing_on=lambda num_bytes: thread.start(send),
        close=close,
    )


def order_for(engine: str, rank: int = 0) -> Order:
    return Order(engine, "http://10.0.0.9:30000", 2, "gloo", None, (1, 2), rank)
