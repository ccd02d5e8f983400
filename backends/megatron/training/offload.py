"""Device memory that is given back between its uses, or while others use the device: its contents
wait in host memory, pinned on CUDA.

What is offloaded is a storage, never a tensor: it shrinks to nothing and grows again in place, so
    that every view of it (a
parameter in a distributed optimizer's buffer, a `main_grad`) stays a view and no `param.data` is
ever reassigned. CUDA's allocator has the memory meanwhile, and `empty_cache` is not needed for
another tensor to take it. On the CPU the same code runs, and moves the contents between host
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, UntypedStorage


class StateOf(Enum):
    CHANGING = "changing"  # kept, and copied out after each use
    FROZEN = "frozen"  # kept, and copied out once
    SCRATCH = "scratch"  # not kept: whoever uses it writes before reading


class OffloadedState:
    """Storages that are on their device inside `present()`, which may be nested, and as long as
    they stay there.

    Args:
        tensors: asked each time that they leave, since an optimizer has no state before its first
            step and gets other tensors from a checkpoint. Storages may be shared; scalars stay, and
            so does what lives on another device.
        device: where the contents are used.
        stays: whether they are on the device outside `present()` too, until `leave` and again from
            `stay` on.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, contents: StateOf = StateOf.CHANGING,
        *, stays: bool = False,
    ) -> None:  # fmt: skip
        self._tensors = tensors
        self._device = device
        self._contents = contents
        self._hosts: dict[int, Tensor] = {}  # by storage: uint8 [bytes]
        # ... and what has left, with its size
        self._away: dict[int, tuple[UntypedStorage, int]] = {}
        self._users = 1
        self._is_resident = stays
        self._stays = stays
        if not stays:
            self._leave()

    @property
    def num_bytes(self) -> int:
        """Bytes that are off the device now."""
        return sum(size for _, size in self._away.values())

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside, the contents are on the device; afterwards their memory there is free, unless
        they stay.
        """
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def stay(self) -> None:
        """StateOf that stay are on the device from now on; no effect on others."""
        if self._stays and not self._is_resident:
            self._enter()
            self._is_resident = True

    def leave(self) -> None:
        """StateOf that stay are on the device only inside `present()` from now on; no effect on
        others.
        """
        if self._is_resident:
            self._is_resident = False
            self._leave()

    def _enter(self) -> None:
        self._users += 1
        for key, (storage, size) in self._away.items():
            storage.resize_(size)
            if key in self._hosts:
                _as_bytes(storage, self._device).copy_(self._hosts[key], non_blocking=True)
        self._away = {}

    def _leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        storages = {storage._cdata: storage for storage in self._storages()}
        if self._contents is not StateOf.SCRATCH:
            hosts = {}
            for key, storage in storages.items():
                host = self._hosts.get(key)
                if host is None or host.numel() != storage.nbytes():
                    host = torch.empty(
                        storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
                    )
                elif self._contents is StateOf.FROZEN:
                    hosts[key] = host
                    continue
                # In the order of the stream: the host is read by the copy back alone, never by the
                # CPU.
                hosts[key] = host.copy_(_as_bytes(storage, self._device), non_blocking=True)
            self._hosts = hosts
        for key, storage in storages.items():
            self._away[key] = (storage, storage.nbytes())
            storage.resize_(0)

    def _storages(self) -> Iterator[UntypedStorage]:
        for tensor in self._tensors():
            if tensor.dim() and tensor.numel() and tensor.device.type == self._device.type:
                yield tensor.untyped_storage()


def _as_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
