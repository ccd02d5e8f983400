"""One enqueued operation: its buffers until it lands, and the `Work` that waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl_rules.buffers import Extent, extent, overlap, poison, raw, unguarded
from tests.nccl_rules.errors import BufferRace

if TYPE_CHECKING:
    from tests.nccl_rules.communicator import Communicator

Arrived = list[tuple[Tensor, Tensor]]  # a receive buffer, and the bytes for it

_guards = threading.local()
_in_flight: set[Operation] = set()  # operations whose buffers are not the program's yet
_lock = threading.Lock()


def guard_depth(change: int = 0) -> int:
    """How many `guard()` this thread is inside."""
    _guards.depth = getattr(_guards, "depth", 0) + change
    return int(_guards.depth)


def in_flight() -> list[Operation]:
    """The operations of this process that have not landed."""
    with _lock:
        return list(_in_flight)


def this_rank() -> str:
    """The global rank, for errors."""
    return str(dist.get_rank()) if dist.is_initialized() else "?"


class Operation:
    """A collective, or a batch of sends and receives, from its call to its `wait()`.

    Args:
        blocks: its call ends when the data is there, so nobody can use a buffer meanwhile.
    """

    def __init__(
        self, communicator: Communicator, what: str, site: str, timeout_s: float, *, blocks: bool
    ) -> None:
        self.communicator = communicator
        self.what = what
        self.site = site
        self.timeout_s = timeout_s
        self.begun = time.monotonic()
        self.deadline = self.begun + timeout_s  # NCCL's watchdog counts from the enqueueing
        self.blocks = blocks
        self.run: Callable[[Operation], Arrived] | None = None
        self.done = threading.Event()
        self.error: Exception | None = None
        self.waited = False
        self._reads: Arrived = []  # send buffers, and their bytes at the call
        self._writes: Arrived = []  # receive buffers, and their poison
        self._arrived: Arrived = []
        self._landing = threading.Lock()
        self._landed = False

    def __str__(self) -> str:
        return f"{self.what} on {self.communicator.name} at {self.site}"

    def read(self, tensor: Tensor) -> Tensor:
        """A copy of what is sent: of the bytes at the call, which may not change until `wait()`."""
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self.blocks and tensor.numel():
            self._reads.append((tensor.detach(), raw(copy)))
        return copy

    def write(self, tensor: Tensor) -> None:
        """Make a receive buffer worthless until `wait()`."""
        if self.blocks or not tensor.numel():
            return
        into = extent(tensor)  # of an operation in place, only the result counts
        self._reads = [(t, sent) for t, sent in self._reads if not overlap(extent(t), into)]
        alias = tensor.detach()  # the program may give `tensor` other memory
        poison(alias)
        self._writes.append((alias, raw(alias).clone()))

    def extents(self) -> list[tuple[Extent, bool]]:
        """The memory in use, and whether it is written."""
        if self._landed:
            return []
        reads = [(extent(tensor), False) for tensor, _ in self._reads]
        return reads + [(extent(tensor), True) for tensor, _ in self._writes]

    def enqueued(self) -> None:
        """From here on its buffers belong to the communication."""
        with _lock:
            _in_flight.add(self)

    def finish(self, arrived: Arrived, error: Exception | None) -> None:
        """On the communicator's thread: the operation is over."""
        self._arrived = arrived
        self.error = error
        self.done.set()

    def land(self) -> None:
        """What has arrived becomes visible, and the buffers are the program's again."""
        with self._landing, unguarded():
            if self._landed:
                return
            self._land()
            self._landed = True
        with _lock:
            _in_flight.discard(self)

    def _land(self) -> None:
        for kind, uses in (("send", self._reads), ("receive", self._writes)):
            for tensor, before in uses:
                if self.error is None and not torch.equal(raw(tensor), before):
                    self.error = BufferRace(
                        f"rank {this_rank()}: the {kind} buffer of {self} was overwritten before"
                        " its wait()"
                    )
        if self.error is None:
            for tensor, data in self._arrived:
                raw(tensor).copy_(data)
        self.run = None
        self._reads = []
        self._writes = []
        self._arrived = []


class Work(torch._C._distributed_c10d.Work):  # type: ignore[misc]
    """What a call returns: `wait()` puts the caller's stream behind the operation.

    The CPU has no stream, so it blocks; inside `guard()` the first touch of the buffer does.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation

    def wait(self, timeout: Any = None) -> bool:
        """Order what follows behind the operation. Raises what became of it."""
        self.operation.waited = True
        if guard_depth() and not self.operation.blocks:
            return True
        self.operation.communicator.complete(self.operation)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Whether the operation is over; then its data is there."""
        if not self.operation.done.is_set():
            return False
        self.operation.communicator.complete(self.operation)
        return True

    def is_success(self) -> bool:
        """Whether it is over without an error."""
        return self.operation.done.is_set() and self.operation.error is None

    def exception(self) -> Exception | None:
        """What became of it."""
        return self.operation.error
