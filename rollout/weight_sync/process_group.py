"""A process group of trainer ranks and one engine: NCCL between different GPUs, otherwise gloo.

In one common group a hung engine would block the others, and we could not free them: neither gloo
nor NCCL cancels a collective whose other ranks are alive, and SGLang sets no deadline.
"""

from __future__ import annotations

import ipaddress
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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

# NCCL has no wait with a deadline, so broadcasts are polled, less often the longer they take.
POLL_S = 0.0002
MAX_POLL_S = 0.02
POLL_SHARE = 0.05  # interval of polls as a share of the time waited so far
NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_DUMPS_LOCK = threading.Lock()  # held while the variable DUMPS is changed
WATCHDOG_FACTOR = 4  # NCCL's watchdog ends the process, so it must fire well after our deadline

# NCCL accepts ranks that share a GPU from this version on, if its variable is 1.
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
    timeout_s: float  # limit of the rendezvous and of each broadcast
    name: str = "weights"  # unique: SGLang refuses to reuse a name, even after the trainer died


def close_late(joining: Future[WeightGroup]) -> None:
    """Close a group that formed after its caller gave up."""
    if joining.exception() is None:
        joining.result().close()


def start_thread(work: Callable[[], T], device: torch.device) -> Future[T]:
    """Run `work` in a new thread, which may outlive the caller and ends at its own deadline.

    Args:
        device: the thread's current device; by default a new thread is on the first GPU.
    """
    thread = WorkThread(device)
    future = thread.start(work)
    thread.close()
    return future


class WorkThread:
    """A thread that does its work items in order, until `close`.

    Args:
        device: the thread's current device; by default a new thread is on the first GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` after all earlier work. Raises RunFailed after `close`."""
        future: Future[T] = Future()
        # The caller may stop waiting, but cannot cancel the work.
        future.set_running_or_notify_cancel()
        with self._closing:
            if self._is_closed:
                raise RunFailed("the weight group is closed")
            self._work.put((work, future))
        return future

    def close(self) -> None:
        """End the thread after its last work item, without waiting for it."""
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
            # Free the bytes of a bucket before waiting for the next one.
            del task, work, future


# --- group ----------------------------------------------------------------------------------------


class WeightGroup:
    """One rank of a process group for weights. The constructor blocks until all ranks have joined.

    Raises DeadlineExceeded if they do not join within `address.timeout_s`, RunFailed if the
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
        # Buffers of the last two calls of `receive`.
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
            raise self._failure("the weight group could not be formed", error) from error
        self._store = store
        # made by the first `_start`
        self._sending: WorkThread | None = None

    def start_sending(self, flat: Tensor) -> Future[None]:
        """Send uint8 [n] after all earlier sends, in the group's thread.

        Raises RunFailed if the group is closed.
        """
        return self._start(lambda: self.send(flat))

    def start_passing_on(self, num_bytes: int) -> Future[None]:
        """Take part in rank 0's broadcast of uint8 [num_bytes], in order like `start_sending`.

        The bytes are passed on to other ranks and dropped.
        """
        return self._start(
            lambda: self._broadcast(
                torch.empty(num_bytes, dtype=torch.uint8, device=self._group_device)
            )
        )

    def _start(self, work: Callable[[], None]) -> Future[None]:
        if self._sending is None:
            self._sending = WorkThread(self.device)
        # A concurrent `close` may have missed the new thread.
        if not self.is_open:
            self._sending.close()
        return self._sending.start(work)

    def send(self, flat: Tensor) -> None:
        """Broadcast uint8 [n]; for rank 0."""
        self._broadcast(flat.to(self._group_device).contiguous())

    def receive(self, num_bytes: int) -> Tensor:
        """Receive uint8 [num_bytes]; for the other ranks. The next call but one overwrites it."""
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
            # A broadcast that waits for its communicator holds the lock that `abort` needs. A
            # daemon thread that returns from NCCL while Python exits would cause a SIGABRT.
            threading.Thread(target=group.abort, name="weights-abort").start()

    @property
    def _group_device(self) -> torch.device:
        return self.device if self.address.backend == "nccl" else torch.device("cpu")

    def _broadcast(self, flat: Tensor) -> None:
        # Another thread may call `close` during the broadcast.
        group = self._group
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
                    time.sleep(min(max(POLL_S, waited * POLL_SHARE), MAX_POLL_S))
                work.wait()
        except RuntimeError as error:
            self.close()
            raise self._failure(
                f"a broadcast of {len(flat)} bytes of weights failed", error
            ) from error
        # NCCL ends an aborted broadcast without an error.
        if self._group is not group:
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
    """Make a bare backend that is not registered with torch.

    SGLang's `init_custom_process_group`, and torch below it, look for the other ranks under these
    prefixes.

    NCCL's communicator is begun here without blocking: if the other side dies before the first
    broadcast, ours waits there for a limited time, and `abort` can end the communicator.
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
        # torch's limit for such a communicator, half an hour by default. torch reads it once.
        os.environ.setdefault(NONBLOCKING_TIMEOUT, str(math.ceil(address.timeout_s)))
        with _without_dumps():
            group = dist.ProcessGroupNCCL(store, rank, address.world_size, options)
        # torch keeps communicators by GPU number: without a number a broadcast would make another.
        numbered = torch.device("cuda", torch.cuda.current_device())
        group.eager_connect_single_device(numbered if device.index is None else device)
        return group
    if rank > 0 and not is_loopback(address.host):
        # This constructor picks the interface of this machine's host name.
        return dist.ProcessGroupGloo(store, rank, address.world_size, limit)
    # Rank 0 is at `host`. Its host name may resolve to the loopback interface, which other machines
    # cannot reach.
    local = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    local._devices = [dist.ProcessGroupGloo.create_device(hostname=address.host)]
    local._timeout = limit
    return dist.ProcessGroupGloo(store, rank, address.world_size, local)


@contextmanager
def _without_dumps() -> Iterator[None]:
    """Keep a new group from asking its store every second whether another rank wants a dump.

    torch takes a bare group for the first of its process, and logs a stack at each such question
    when the store is gone. The group's constructor reads the variable. Groups are made in threads.
    """
    with _DUMPS_LOCK:
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
    """Open a store that an engine at `url` can reach, for a group of this rank and `others` more.

    Raises OSError or torch's DistError if no route leads to the engine.
    """
    host = own_address(url)
    store = bound_store(host, timeout_s)
    name = f"weights-{secrets.token_hex(8)}"
    return GroupAddress(host, store.port, 1 + others, backend, timeout_s, name), store


def choose_backend(trainer: str | None, engine: str | None) -> Backend:
    """Choose NCCL if trainer and engine have different GPUs, otherwise gloo.

    Args:
        trainer, engine: the identity of its GPU; None without a GPU of its own.
    """
    if trainer is None or engine is None:
        return "gloo"
    return "nccl" if trainer != engine or ranks_share_gpus() else "gloo"


def ranks_share_gpus() -> bool:
    """Whether the environment lets ranks of a process group share a GPU, to debug a layout."""
    return os.environ.get(SHARED_GPU) == "1"


def gpu_identity(device: torch.device) -> str | None:
    """The GPU's UUID, which is the same in every process; None on the CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


# Holds Ray's id of the node, which its launcher sets for ranks and engine hosts.
NODE = "RLCORE_NODE"


def node_identity() -> str:
    """Return the id of this process's node, unique among the nodes of a run.

    It is that of the launcher: Ray's, or the number of torchrun's agent. Host names may be the same
    on several machines, and a machine may have several nodes, as containers that each see GPUs of
    their own under the same numbers.
    """
    return os.environ.get(NODE) or os.environ.get("GROUP_RANK", "0")


def name_gpus(gpus: Sequence[str]) -> tuple[str, ...]:
    """Name GPUs of this node, given as in CUDA_VISIBLE_DEVICES, so that other nodes know them."""
    node = node_identity()
    return tuple(f"{node} {gpu}" for gpu in gpus)


# Holds the interface that a rank has chosen for itself.
CHOSEN_INTERFACE = "RLCORE_INTERFACE"


def own_address(url: str) -> str:
    """The address under which the server at `url` reaches this machine.

    It is the source address of packets to that server. No packet is sent.
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
    """The network interface of this machine with `address`; None if there is none."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    return None


def is_here(url: str) -> bool:
    """Whether the server at `url` is on this machine; a name that is not known may be."""
    host = urlsplit(url).hostname
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return True
    return is_loopback(address) or interface_of(address) is not None


def is_loopback(host: str) -> bool:
    """Whether a name or address is on the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
