"""The way of weights between processes: one process group of the trainer's rank 0 and the engine processes.

It is no part of any torch.distributed world: it is made from a store and a backend alone, so either side may or may not
have a default group, and it can be thrown away and made again whenever an engine joins or dies. Rank 0 opens a store on a
free port and sends; everybody else receives. Nothing here waits without a limit.
"""

from __future__ import annotations

import ipaddress
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.errors import DeadlineExceeded, RunFailed

Backend = Literal["gloo", "nccl"]

POLL_S = 0.001
WATCHDOG_FACTOR = 4     # NCCL's own watchdog ends the process: it must come well after our deadline


@dataclass(frozen=True)
class GroupAddress:
    """Where and how a group meets; JSON-able through `dataclasses.asdict`."""

    host: str
    port: int
    world_size: int
    backend: Backend
    timeout_s: float        # for the meeting, and for each broadcast
    name: str = "weights"   # SGLang makes no second group of a name, not even of a dead trainer's


class WeightGroup:
    """One member of the group. Making it blocks until all members are there.

    Raises DeadlineExceeded when they are not within `address.timeout_s`, RunFailed when the connection breaks.
    """

    def __init__(self, address: GroupAddress, rank: int, *, device: torch.device, store: dist.Store | None = None) -> None:
        self.address, self.rank, self.device = address, rank, device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2     # that received last, the one before
        self._group: Any = None
        self._store: dist.Store | None = None
        limit = timedelta(seconds=address.timeout_s)
        try:
            if store is None:
                store = dist.TCPStore(address.host, address.port, None, False, limit, wait_for_workers=False)
            self._group = make_group(address, rank, store)
        except (dist.DistError, RuntimeError) as error:
            raise self._failure("the weight group did not come together", error) from error
        self._store = store

    def send(self, flat: Tensor) -> None:
        """Rank 0: broadcast uint8 [n]."""
        self._broadcast(flat.to(self._group_device).contiguous())

    def receive(self, num_bytes: int, into: Tensor | None = None) -> Tensor:
        """The others: uint8 [num_bytes], in `into` if it is where the group's bytes come, else in a buffer of our own.

        That buffer is overwritten by the next call but one.
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
        return self._group is not None

    def close(self) -> None:
        """Break the connections, from any thread: who still waits, on this side or the other, gets an error."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()

    @property
    def _group_device(self) -> torch.device:
        return self.device if self.address.backend == "nccl" else torch.device("cpu")

    def _broadcast(self, flat: Tensor) -> None:
        group = self._group         # `close` may come from another thread meanwhile
        if group is None:
            raise RunFailed("the weight group is closed")
        deadline = time.monotonic() + self.address.timeout_s
        try:
            work = group.broadcast(flat, 0)
            if self.address.backend == "gloo":
                work.wait(timedelta(seconds=self.address.timeout_s))
                return
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError("Operation timed out")
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:
            self.close()
            raise self._failure(f"a broadcast of {len(flat)} bytes of weights failed", error) from error

    def _failure(self, what: str, error: Exception) -> RunFailed:
        kind = DeadlineExceeded if "time" in str(error).lower() and "out" in str(error).lower() else RunFailed
        where = f"rank {self.rank} of {self.address.world_size} at {self.address.host}:{self.address.port}"
        return kind(f"{what} ({where}, limit {self.address.timeout_s:.0f} s, rollout.engine.update_timeout_s): {error}")


def open_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """A store on a free port of this machine, for rank 0; returns it with its port."""
    store = dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    return store, store.port


def make_group(address: GroupAddress, rank: int, store: dist.Store) -> Any:
    """A bare backend, registered nowhere. NCCL needs engine and trainer on different GPUs (not run on any GPU yet).

    The prefixes are those under which SGLang's `init_custom_process_group` and torch below it look for the other members.
    """
    limit = timedelta(seconds=address.timeout_s)
    device = "cuda" if address.backend == "nccl" else "cpu"
    store.set_timeout(limit)
    for prefix in (address.name, f"{address.name}/", f"{device}/"):
        store = dist.PrefixStore(prefix, store)
    if address.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit * WATCHDOG_FACTOR
        return dist.ProcessGroupNCCL(store, rank, address.world_size, options)
    if rank > 0 and not is_loopback(address.host):
        return dist.ProcessGroupGloo(store, rank, address.world_size, limit)    # picks the interface of the host name
    # Rank 0 is at `host`; its host's name may stand for the loopback interface, where others do not reach it.
    local = dist.ProcessGroupGloo._Options()    # type: ignore[attr-defined]
    local._devices = [dist.ProcessGroupGloo.create_device(hostname=address.host)]
    local._timeout = limit
    return dist.ProcessGroupGloo(store, rank, address.world_size, local)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def gpu_identity(device: torch.device) -> str | None:
    """What tells one GPU from another, however the processes number them; None on the CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
