"""A process group of ranks of the trainer and one engine: NCCL between different GPUs, else gloo.

In one common group, an engine that hangs would hold up the others, and we could not free them:
neither gloo nor NCCL lets go of a collective whose other ranks are alive, and SGLang sets no
deadline of its own.
"""

from __future__ import annotations

import ipaddress
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.errors import DeadlineExceeded, RunFailed
from rlcore.stores import bound_store

# NCCL has no wait with a deadline: a look comes the later, the longer a broadcast takes
POLL_S = 0.0002
MOST_POLL_S = 0.02
POLL_SHARE = 0.05  # of the time that was waited
NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_MAKING = threading.Lock()  # while the variable is changed
WATCHDOG_FACTOR = 4  # NCCL's own watchdog ends the process: it must come well after our deadline

# NCCL takes ranks that share a GPU from this version on, where its variable is 1.
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARED_SINCE = "2.30"

Backend = Literal["gloo", "nccl"]
T = TypeVar("T")


@dataclass(frozen=True)
class GroupAddress:
    """The rendezvous of a group; JSON-able through `dataclasses.asdict`."""

    host: str
    port: int
    world_size: int
    backend: Backend
    timeout_s: float  # for the rendezvous, and for each broadcast
    name: str = "weights"  # SGLang makes no second group of a name, even after the trainer died


def close_late(joining: Future[WeightGroup]) -> None:
    """Close a group that came together after it was given up."""
    if joining.exception() is None:
        joining.result().close()


def start_thread(work: Callable[[], T], device: torch.device) -> Future[T]:
    """Run `work` in a thread of its own, which may outlive the caller.

    The thread ends at a deadline of its own, which is not waited for.

    Args:
        device: the current one there; a new thread would be on the first GPU.
    """
    thread = WorkThread(device)
    future = thread.start(work)
    thread.close()
    return future


class WorkThread:
    """A thread that does one piece of work after the other, until `close`.

    Args:
        device: the current one there; a new thread would be on the first GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` when all that was given before is done. Raises RunFailed after `close`."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # the caller may give it up, but not stop the thread
        with self._closing:
            if self._is_closed:
                raise RunFailed("the weight group is closed")
            self._work.put((work, future))
        return future

    def close(self) -> None:
        """End the thread when all work that it was given is done; nobody waits for that."""
        with self._closing:
            self._is_closed = True
            self._work.put(None)

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            work, future = task
            try:
                if self._device.type == "cuda" and torch.cuda.is_available():
                    torch.cuda.set_device(self._device)
                future.set_result(work())
            except BaseException as failure:  # noqa: BLE001 - recovery: raised in the caller
                future.set_exception(failure)
            del task, work, future  # the bytes of a bucket, while this waits for the next


# --- the group ------------------------------------------------------------------------------------


class WeightGroup:
    """One rank of a process group for weights. Making it blocks until all ranks are there.

    Raises DeadlineExceeded when they are not there within `address.timeout_s`, RunFailed when the
    connection breaks.
    """

    def __init__(
        self,
        address: GroupAddress,
        rank: int,
        *,
        device: torch.device,
        store: dist.Store | None = None,
    ) -> None:
        self.address = address
        self.rank = rank
        self.device = device
        # of the last and of the last but one `receive`
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._group: Any = None
        self._store: dist.Store | None = None
        limit = timedelta(seconds=address.timeout_s)
        try:
            if store is None:
                store = dist.TCPStore(
                    address.host, address.port, None, False, limit, wait_for_workers=False
                )
            self._group = make_group(address, rank, store, device)
        except (dist.DistError, RuntimeError) as error:
            raise self._failure("the weight group did not come together", error) from error
        self._store = store
        self._sending: WorkThread | None = None  # from the first `_start` on

    def start_sending(self, flat: Tensor) -> Future[None]:
        """Send uint8 [n] when all that came before is sent, in the one thread that this group has.

        Raises RunFailed where the group is closed.
        """
        return self._start(lambda: self.send(flat))

    def start_passing_on(self, num_bytes: int) -> Future[None]:
        """Take part in rank 0's broadcast of uint8 [num_bytes], as `start_sending` does.

        The bytes are passed on to other ranks, and not kept.
        """
        return self._start(
            lambda: self._broadcast(
                torch.empty(num_bytes, dtype=torch.uint8, device=self._group_device)
            )
        )

    def _start(self, work: Callable[[], None]) -> Future[None]:
        if self._sending is None:
            self._sending = WorkThread(self.device)
        if not self.is_open:  # `close` may not have seen the thread
            self._sending.close()
        return self._sending.start(work)

    def send(self, flat: Tensor) -> None:
        """Broadcast uint8 [n]; for rank 0."""
        self._broadcast(flat.to(self._group_device).contiguous())

    def receive(self, num_bytes: int, into: Tensor | None = None) -> Tensor:
        """Receive uint8 [num_bytes]; for the other ranks.

        The bytes come into `into` if that is on the group's device, else into a buffer of our own,
        which the next call but one overwrites.
        """
        if into is not None and into.device.type == self._group_device.type:
            self._broadcast(into)
            return into
        self._buffers.reverse()
        if self._buffers[0].numel() < num_bytes:
            self._buffers[0] = torch.empty(num_bytes, dtype=torch.uint8, device=self._group_device)
        flat = self._buffers[0][:num_bytes]
        self._broadcast(flat)
        return flat

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called and no broadcast failed."""
        return self._group is not None

    def close(self) -> None:
        """Break the connections, from any thread. Both sides' pending broadcasts fail."""
        group = self._group
        self._group = None
        self._store = None
        if group is None:
            return
        if self._sending is not None:
            self._sending.close()
        if self.address.backend == "gloo":
            group.abort()
        else:
            # A broadcast that waits for its communicator holds the lock that this needs. A daemon
            # that comes back from NCCL while Python ends would end the process by SIGABRT.
            threading.Thread(target=group.abort, name="weights-abort").start()

    @property
    def _group_device(self) -> torch.device:
        return self.device if self.address.backend == "nccl" else torch.device("cpu")

    def _broadcast(self, flat: Tensor) -> None:
        group = self._group  # `close` may come from another thread meanwhile
        if group is None:
            raise RunFailed("the weight group is closed")
        began = time.monotonic()
        try:
            work = group.broadcast(flat, 0)
            if self.address.backend == "gloo":
                work.wait(timedelta(seconds=self.address.timeout_s))
            else:
                while not work.is_completed():
                    waited = time.monotonic() - began
                    if waited > self.address.timeout_s:
                        raise RuntimeError("Operation timed out")
                    time.sleep(min(max(POLL_S, waited * POLL_SHARE), MOST_POLL_S))
                work.wait()
        except RuntimeError as error:
            self.close()
            raise self._failure(
                f"a broadcast of {len(flat)} bytes of weights failed", error
            ) from error
        if self._group is not group:  # NCCL ends an aborted broadcast without an error
            raise RunFailed(f"the weight group was closed in a broadcast of {len(flat)} bytes")

    def _failure(self, what: str, error: Exception) -> RunFailed:
        kind = (
            DeadlineExceeded
            if "time" in str(error).lower() and "out" in str(error).lower()
            else RunFailed
        )
        where = (
            f"rank {self.rank} of {self.address.world_size} at"
            f" {self.address.host}:{self.address.port}"
        )
        return kind(
            f"{what} ({where}, limit {self.address.timeout_s:.0f} s,"
            f" rollout.engine.update_timeout_s): {error}"
        )


def make_group(address: GroupAddress, rank: int, store: dist.Store, device: torch.device) -> Any:
    """Make a bare backend, which is registered nowhere.

    SGLang's `init_custom_process_group`, and torch below it, look for the other ranks under these
    prefixes.

    NCCL's communicator is begun here and does not block: if the other side dies before the first
    broadcast, ours waits there for a limited time, and `abort` knows the communicator.
    """
    limit = timedelta(seconds=address.timeout_s)
    kind = "cuda" if address.backend == "nccl" else "cpu"
    store.set_timeout(limit)
    for prefix in (address.name, f"{address.name}/", f"{kind}/"):
        store = dist.PrefixStore(prefix, store)
    if address.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit * WATCHDOG_FACTOR
        options.config.blocking = 0
        # How long torch waits for such a communicator: half an hour by default. It is read once.
        os.environ.setdefault(NONBLOCKING_TIMEOUT, str(math.ceil(address.timeout_s)))
        with _without_dumps():
            group = dist.ProcessGroupNCCL(store, rank, address.world_size, options)
        # torch keeps communicators by the GPU's number: without one, a broadcast makes another
        numbered = torch.device("cuda", torch.cuda.current_device())
        group.eager_connect_single_device(numbered if device.index is None else device)
        return group
    if rank > 0 and not is_loopback(address.host):
        # this picks the interface of the host's name
        return dist.ProcessGroupGloo(store, rank, address.world_size, limit)
    # Rank 0 is at `host`. The name of its host may stand for the loopback interface, where other
    # machines do not reach it.
    local = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    local._devices = [dist.ProcessGroupGloo.create_device(hostname=address.host)]
    local._timeout = limit
    return dist.ProcessGroupGloo(store, rank, address.world_size, local)


@contextmanager
def _without_dumps() -> Iterator[None]:
    """Inside, a new group does not ask its store every second whether another rank wants a dump.

    torch takes a bare group for the first of its process, and logs a stack at each such question
    when the store is gone. It reads the variable in the constructor. Groups are made in threads.
    """
    with _MAKING:
        before = os.environ.get(DUMPS)
        os.environ[DUMPS] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[DUMPS]
            else:
                os.environ[DUMPS] = before


# --- devices and addresses ------------------------------------------------------------------------


def open_rendezvous(
    url: str, others: int, backend: Backend, timeout_s: float
) -> tuple[GroupAddress, dist.Store]:
    """Open a store where an engine at `url` can reach it, for a group of this rank and `others`.

    Raises OSError and torch's DistError where there is no way to the engine.
    """
    host = own_address(url)
    store = bound_store(host, timeout_s)
    name = f"weights-{secrets.token_hex(8)}"
    return GroupAddress(host, store.port, 1 + others, backend, timeout_s, name), store


def choose_backend(trainer: str | None, engine: str | None) -> Backend:
    """NCCL if trainer and engine have different GPUs, else gloo.

    Args:
        trainer, engine: what identifies its GPU; None where it has none of its own.
    """
    if trainer is None or engine is None:
        return "gloo"
    return "nccl" if trainer != engine or ranks_share_gpus() else "gloo"


def ranks_share_gpus() -> bool:
    """Whether the environment lets ranks of a process group share a GPU, to debug a layout."""
    return os.environ.get(SHARED_GPU) == "1"


def gpu_identity(device: torch.device) -> str | None:
    """An identity of the GPU in every process's numbering; None on the CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def own_address(url: str) -> str:
    """The address under which the server at `url` reaches this machine.

    It is the source address of packets to that server. None is sent.
    """
    parts = urlsplit(url)
    family, kind, protocol, _, there = socket.getaddrinfo(
        parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(there)
        address = str(way.getsockname()[0])
    return "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has `address`; None: there is none."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Whether a name or address stands for this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
