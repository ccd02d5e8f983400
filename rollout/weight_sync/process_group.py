"""Engines in other processes take each bucket over a process group: NCCL between different GPUs,
else gloo.

`DistributedTransport` has one `Link` an engine: a `WeightGroup` of the trainer and that engine, and
all links send at once. In one common group, an engine that hangs would hold up the others, and we
could not free them: neither gloo nor NCCL lets go of a collective whose other ranks are alive, and
SGLang sets no deadline of its own. The price is that every engine's copy leaves the trainer's
device.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.deadlines import GROUP_JOIN_S
from rlcore.errors import DeadlineExceeded, EngineFailed, RunFailed
from rlcore.stores import bound_store
from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, Transport, ask
from rollout.weight_sync.bucket_checks import SentDigests, Wanted, digest_kind

POLL_S = 0.001
NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
WATCHDOG_FACTOR = 4  # NCCL's own watchdog ends the process: it must come well after our deadline

Backend = Literal["gloo", "nccl"]
T = TypeVar("T")


@dataclass(frozen=True)
class GroupAddress:
    """Where and how a group meets; JSON-able through `dataclasses.asdict`."""

    host: str
    port: int
    world_size: int
    backend: Backend
    timeout_s: float  # for the meeting, and for each broadcast
    name: str = "weights"  # SGLang makes no second group of a name, even after the trainer died


class DistributedTransport(Transport):
    """Broadcasts the weights in a group with each engine, which has these members:

        url           where it is reached; the way there tells which address of ours it can reach
        group_ranks   the ranks of the group that are its own: its tensor-parallel ranks
        in_group      the name of its group; None again after a start or a new connection
        join_group(address, rank)
                      leaves its group and enters another, with the ranks from `rank` on; returns
                      when all ranks of the group are there
        receive_bucket(index, None)
                      receives bucket `index` over the group, and loads it
        health()      tells under `gpu` what identifies its GPU; None stands for the CPU, and for a
                      GPU that it shares with the trainer

    and, if its `digests_buckets` is true, `receive_bucket(index, None, order)` for a digest of what
    it receives (digests.py), and `bucket_digests()`: those since `begin_update`, by index.

    Args:
        device: where the trainer's buckets are.
        timeout_s: for one bucket (`rollout.engine.update_timeout_s`).
        probe_s: for an answer to /health (`rollout.engine.health_timeout_s`).
        digests: `rollout.engine.bucket_digests`.
    """

    name = "distributed"

    def __init__(
        self, *, device: torch.device, timeout_s: float, probe_s: float, digests: Wanted = "auto"
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._device = device
        self._probe_s = probe_s
        self._links: dict[Engine, Link] = {}
        self._digests = digests
        self._sent = SentDigests()  # in the current transaction

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Join a group with each engine, unless one from an earlier publication is still whole."""
        for engine in [engine for engine, link in self._links.items() if not link.is_whole]:
            self._links.pop(engine).close()
        new = [engine for engine in engines if engine not in self._links]
        answers = await ask(new, "health", lambda e: e.health(), self._probe_s)
        for engine, health in answers.results.items():
            backend = choose_backend(gpu_identity(self._device), health["gpu"])
            self._links[engine] = Link(engine, backend, self._device, self._timeout_s)
        self._engines = [engine for engine in engines if engine not in answers.failed]
        self._sent = SentDigests()
        return answers.failed | await self._on_links(lambda link: link.join())

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Broadcast the bucket in all groups at once."""
        if all(self._links[engine].backend == "gloo" for engine in self._engines):
            flat = flat.cpu()  # once for all
        orders = SentDigests.orders(map(self._kind, self._engines))
        sending = self._on_links(
            lambda link: link.send(bucket, flat, orders[self._kind(link.engine)])
        )
        failed, _ = await asyncio.gather(sending, self._sent.add(bucket, flat, orders))
        return failed

    async def complete(self) -> Failures:
        """Compare the digests of what the engines received with those of what was sent."""
        return await self._sent.compare(
            {engine: self._kind(engine) for engine in self._engines}, self._timeout_s
        )

    def _kind(self, engine: Engine) -> str | None:
        return digest_kind(self._digests, engine, self._links[engine].backend)

    async def close(self) -> None:
        """Close all groups."""
        await super().close()
        for link in self._links.values():
            link.close()
        self._links = {}

    async def _on_links(self, step: Callable[[Link], Any]) -> Failures:
        reasons = await asyncio.gather(*(step(self._links[engine]) for engine in self._engines))
        return {engine: why for engine, why in zip(self._engines, reasons) if why is not None}


class Link:
    """The process group of the trainer, rank 0, and one engine.

    `join` and `send` return why the engine failed, or None.
    """

    def __init__(
        self, engine: Engine, backend: Backend, device: torch.device, timeout_s: float
    ) -> None:
        self.engine = engine
        self.backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self.group: WeightGroup | None = None

    @property
    def is_whole(self) -> bool:
        """Whether both sides are in it. An engine that was started again is in no group."""
        return (
            self.group is not None
            and self.group.is_open
            and self.group.address.name == self.engine.in_group
        )

    async def join(self) -> str | None:
        """Make the group unless it is whole."""
        if self.is_whole:
            return None
        limit = min(self._timeout_s, GROUP_JOIN_S)
        try:
            host = await asyncio.to_thread(own_address, self.engine.url)
            store = await asyncio.to_thread(bound_store, host, self._timeout_s)
        # recovery: without this engine, by the caller
        except (EngineFailed, OSError, dist.DistError) as error:
            return f"engine {self.engine.name} cannot be met: {error}"
        size = 1 + self.engine.group_ranks
        address = GroupAddress(
            host, store.port, size, self.backend, self._timeout_s, f"weights-{secrets.token_hex(8)}"
        )
        meeting = in_thread(lambda: WeightGroup(address, 0, device=self._device, store=store))
        why = await self._asked("join_group", lambda e: e.join_group(address, 1), limit)
        if why is not None:
            meeting.add_done_callback(close_late)
            return why
        done, _ = await asyncio.wait({meeting}, timeout=limit)
        if not done:
            meeting.add_done_callback(close_late)
            return f"engine {self.engine.name} was not met by our side within {limit:g} s"
        try:
            self.group = meeting.result()
        except RunFailed as error:  # recovery: as above
            return str(error)
        return None

    async def send(self, bucket: Bucket, flat: Tensor, order: str | None = None) -> str | None:
        """Broadcast the bucket, and wait until the engine has loaded it (and made its digest)."""
        group = self.group
        assert group is not None, "open the transport first"
        sending = in_thread(lambda: group.send(flat))
        try:
            ordered = () if order is None else (order,)
            why = await self._asked(
                "receive_bucket",
                lambda e: e.receive_bucket(bucket.index, None, *ordered),
                self._timeout_s,
            )
        # half a bucket may have been sent: the next publication needs a new group
        except asyncio.CancelledError:
            self.close()
            raise
        # our side may hang until its own deadline, and is not waited for
        if why is not None:
            sending.add_done_callback(lambda done: done.exception())
            self.close()
            return why
        try:
            await sending
        except RunFailed as error:  # recovery: as above
            self.close()
            return str(error)
        return None

    def close(self) -> None:
        """Close the group, if there is one."""
        if self.group is not None:
            self.group.close()
            self.group = None

    async def _asked(self, what: str, call: Callable[[Any], Any], seconds: float) -> str | None:
        return (await ask([self.engine], what, call, seconds)).failed.get(self.engine)


def close_late(meeting: asyncio.Future[WeightGroup]) -> None:
    """Close a group that came together after it was given up."""
    if meeting.exception() is None:
        meeting.result().close()


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a thread of its own, which may outlive the event loop.

    The thread ends at a deadline of its own, which is not waited for.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the caller may give it up, but not stop the thread

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as failure:  # noqa: BLE001 - recovery: raised in the caller
            future.set_exception(failure)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return asyncio.wrap_future(future)


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
        if self.address.backend == "gloo":
            group.abort()
        else:  # a broadcast that waits for its communicator holds the lock that this needs
            threading.Thread(target=group.abort, name="weights-abort", daemon=True).start()

    @property
    def _group_device(self) -> torch.device:
        return self.device if self.address.backend == "nccl" else torch.device("cpu")

    def _broadcast(self, flat: Tensor) -> None:
        group = self._group  # `close` may come from another thread meanwhile
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
            raise self._failure(
                f"a broadcast of {len(flat)} bytes of weights failed", error
            ) from error

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
    """Make a bare backend, which is registered nowhere (NCCL was not run on any GPU yet).

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
        group = dist.ProcessGroupNCCL(store, rank, address.world_size, options)
        group.eager_connect_single_device(device)
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


# --- devices and addresses ------------------------------------------------------------------------


def choose_backend(trainer: str | None, engine: str | None) -> Backend:
    """NCCL if trainer and engine have different GPUs, else gloo.

    Args:
        trainer, engine: what identifies its GPU; None where it has none of its own.
    """
    return "gloo" if trainer is None or engine is None or trainer == engine else "nccl"


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


def is_loopback(host: str) -> bool:
    """Whether a name or address stands for this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
