"""The bookkeeping of a dry run: live bytes and their peaks, and collectives."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor, UntypedStorage

_OURS = ("/backends/megatron/", "/megatron/core/", "/rlcore/")
_SKIPPED = ("/megatron/dryrun/", "/megatron/cpu/shim.py", "/rlcore/cli.py", "/commands/dryrun.py")


@dataclass(frozen=True)
class Peak:
    """The most bytes that were live in a phase, and the operation that reached them."""

    bytes: int
    operation: str
    place: str


@dataclass
class Phase:
    """The counts of one phase."""

    peak: Peak
    # (group, operation) -> [calls, bytes of the largest tensor of each call]
    collectives: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    # Source line -> reads of fake numbers by the host, for each of which a GPU would wait.
    reads: Counter[str] = field(default_factory=Counter)


class _Watch(weakref.ref[UntypedStorage]):
    """A weak reference to a storage, with the storage's key."""

    __slots__ = ("key",)
    key: int


class Usage:
    """Live bytes by storage, and the counts of each phase."""

    def __init__(self) -> None:
        self.live = 0
        self.phases: dict[str, Phase] = {}
        self.operations = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, _Watch] = {}
        self._host: set[int] = set()
        self._on_host = 0
        self._phase = Phase(Peak(0, "", ""))

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Inside, everything is counted under `name`."""
        before = self._phase
        self._phase = self.phases[name] = Phase(Peak(self.live, "", "its start"))
        try:
            yield self._phase
        finally:
            self._phase = before

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Inside, new storages are host memory, which is not counted."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor was made inside `on_host`."""
        return tensor.untyped_storage()._cdata in self._host

    def add(self, tensor: Tensor, operation: str) -> None:
        """Count the storage of a tensor, unless it is already counted with this size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known == size or key in self._host:
            return
        if known is None:
            watch = _Watch(storage, self._gone)
            watch.key = key
            self._watches[key] = watch
            if self._on_host:
                self._host.add(key)
                return
        self._sizes[key] = size
        self.live += size - (known or 0)
        if self.live > self._phase.peak.bytes:
            dtype = str(tensor.dtype).removeprefix("torch.")
            what = f"{operation} {list(tensor.shape)} {dtype}"
            self._phase.peak = Peak(self.live, what, location())

    def measure_again(self) -> None:
        """Update the sizes of all storages: no operation reports a resize."""
        for key, watch in list(self._watches.items()):
            storage = watch()
            if storage is not None and key in self._sizes:
                size = storage.nbytes()
                self.live += size - self._sizes[key]
                self._sizes[key] = size
        if self.live > self._phase.peak.bytes:
            self._phase.peak = Peak(self.live, "onload", location())

    def _gone(self, watch: weakref.ref[UntypedStorage]) -> None:
        assert isinstance(watch, _Watch)
        self.live -= self._sizes.pop(watch.key, 0)
        self._host.discard(watch.key)
        self._watches.pop(watch.key, None)

    def add_collective(self, group: str, operation: str, num_bytes: int) -> None:
        """Count one call of a collective."""
        entry = self._phase.collectives.setdefault((group, operation), [0, 0])
        entry[0] += 1
        entry[1] += num_bytes

    def add_read(self) -> None:
        """Count a number that the host read from the device."""
        self._phase.reads[location()] += 1


def storage_bytes(tensors: Iterator[Tensor]) -> int:
    """The bytes of the storages of some tensors, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def location() -> str:
    """Return the innermost line of the project or of Megatron on the stack.

    Inside a backward pass the name of the graph's node comes first, and alone without such a line.
    """
    found: list[str] = []
    node = torch._C._current_autograd_node()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not found:
        path = frame.f_code.co_filename
        if any(part in path for part in _OURS) and not any(part in path for part in _SKIPPED):
            short = next(path.split(part)[-1] for part in _OURS if part in path)
            found.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    if node is not None:
        found.insert(0, node.name())
    return " < ".join(found) or "outside the project"
