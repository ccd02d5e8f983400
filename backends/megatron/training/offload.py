"""Tensors that free their device memory while their contents are in host memory, pinned on CUDA.

Offloading works on storages, not on tensors: a storage shrinks to nothing and grows again in place,
so that every view of it (a parameter in a distributed optimizer's buffer, a `main_grad`) stays a
view and no `param.data` is ever reassigned. Meanwhile CUDA's allocator has the memory, and another
tensor can use it without `empty_cache`. On the CPU the same code moves the contents between host
tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, UntypedStorage

from rlcore.deadlines import FREED_S
from rlcore.errors import DeadlineExceeded

POLL_S = 0.02
GIB = 1 << 30


class Retention(Enum):
    """The treatment of contents while they are off the device."""

    CHANGING = "changing"  # kept, and copied out after each use
    FROZEN = "frozen"  # kept, and copied out once
    SCRATCH = "scratch"  # not kept: every user writes before it reads


class OffloadedTensors:
    """Storages that are on their device inside `on_device()`, which may be nested.

    Args:
        tensors: called at each offload, since an optimizer has no state before its first step and
            gets other tensors from a checkpoint. Storages may be shared; scalars and tensors on
            another device stay.
        device: the device on which the contents are used.
        keep_on_device: keep the contents on the device outside `on_device()` too, until `offload`
            and again after `onload`.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        retention: Retention = Retention.CHANGING,
        *,
        keep_on_device: bool = False,
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._retention = retention
        # Storage key -> host copy, uint8 [bytes].
        self._hosts: dict[int, Tensor] = {}
        # Storages that are off the device, with their sizes.
        self._offloaded: dict[int, tuple[UntypedStorage, int]] = {}
        # Whether a copy to host memory may still be under way.
        self._copying = False
        # The number of open contexts, plus 1 while this object keeps the tensors on the device.
        self._users = 1
        self._keep_on_device = keep_on_device
        self._keeps_now = keep_on_device
        if not keep_on_device:
            self._release()

    @property
    def num_bytes(self) -> int:
        """Bytes that are off the device now."""
        return sum(size for _, size in self._offloaded.values())

    @property
    def returning_bytes(self) -> int:
        """Bytes that `onload` brings back to the device."""
        return self.num_bytes if self._keep_on_device and not self._keeps_now else 0

    @property
    def is_away(self) -> bool:
        """Whether the contents are off the device."""
        return self._users == 0

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, the contents are on the device; afterwards their device memory is free again."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def part_on_device(self, tensors: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Inside, some of the tensors are on the device; all of them are where they are kept there.

        Args:
            tensors: called again at the end, for tensors that were made inside.
        """
        if not self.is_away:
            yield
            return
        self._bring(self._storages(tensors))
        try:
            yield
        finally:
            self._send_away(self._storages(tensors))

    def contents(self, tensor: Tensor) -> Tensor:
        """Return a tensor's contents where they are: the tensor, or a view of its host copy."""
        key = tensor.untyped_storage()._cdata
        if key not in self._offloaded:
            return tensor
        if self._copying:
            torch.cuda.current_stream(self._device).synchronize()
            self._copying = False
        whole = self._hosts[key].view(tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def onload(self) -> None:
        """Keep tensors with `keep_on_device` on the device from now on; inverse of `offload`."""
        if self._keep_on_device and not self._keeps_now:
            self._acquire()
            self._keeps_now = True

    def offload(self) -> None:
        """Keep the tensors on the device only inside `on_device()` from now on."""
        if self._keeps_now:
            self._keeps_now = False
            self._release()

    def _acquire(self) -> None:
        self._users += 1
        self._bring([storage for storage, _ in self._offloaded.values()])

    def _release(self) -> None:
        self._users -= 1
        if self._users:
            return
        storages = list(self._storages(self._tensors))
        # Tensors that no longer exist need no host copy.
        kept = {storage._cdata for storage in storages}
        self._hosts = {key: host for key, host in self._hosts.items() if key in kept}
        self._send_away(storages)

    def _bring(self, storages: Iterable[UntypedStorage]) -> None:
        for storage in storages:
            key = storage._cdata
            # Another tensor with this storage may have brought it.
            if key not in self._offloaded:
                continue
            storage.resize_(self._offloaded.pop(key)[1])
            if key in self._hosts:
                _as_bytes(storage, self._device).copy_(self._hosts[key], non_blocking=True)

    def _send_away(self, storages: Iterable[UntypedStorage]) -> None:
        found = {storage._cdata: storage for storage in storages}
        for key, storage in found.items():
            if self._retention is not Retention.SCRATCH:
                self._hosts[key] = self._copied_out(key, storage)
            self._offloaded[key] = (storage, storage.nbytes())
            storage.resize_(0)

    def _copied_out(self, key: int, storage: UntypedStorage) -> Tensor:
        """The host tensor that holds the contents of a storage."""
        host = self._hosts.get(key)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
        elif self._retention is Retention.FROZEN:
            return host
        # Stream order is enough for the copy back to the device; `contents` waits.
        self._copying = self._device.type == "cuda"
        return host.copy_(_as_bytes(storage, self._device), non_blocking=True)

    def _storages(self, tensors: Callable[[], Iterable[Tensor]]) -> Iterator[UntypedStorage]:
        for tensor in tensors():
            if tensor.dim() and tensor.numel() and tensor.device.type == self._device.type:
                yield tensor.untyped_storage()


def wait_for_memory(
    device: torch.device, needed: int, *, free: Callable[[], int], timeout_s: float = FREED_S
) -> None:
    """Wait until a device has `needed` free bytes.

    An engine has answered that it released its memory when one of its ranks has; the others may
    need a moment more.

    Args:
        free: returns the free bytes of the device.

    Raises DeadlineExceeded with both numbers.
    """
    deadline = time.monotonic() + timeout_s
    while (found := free()) < needed:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{device}: the trainer needs {needed / GIB:.1f} GiB to return, and {timeout_s:g} s"
                f" after the engines released their memory {found / GIB:.1f} GiB are free: lower"
                " rollout.engine.server.mem_fraction_static, or see what else uses the GPU"
            )
        time.sleep(POLL_S)


def _as_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
