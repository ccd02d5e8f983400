"""`guard()`: `wait()` returns at once, and only torch operations on a buffer wait for its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nccl_rules.base import groups
from tests.nccl_rules.buffers import call_site, extent, is_unguarded, overlap, unguarded
from tests.nccl_rules.errors import BufferRace
from tests.nccl_rules.operation import guard_depth, in_flight, this_rank

_WAITING = {"cpu", "tolist", "item", "numpy", "__format__", "__repr__"}
_HARMLESS = ("aten::empty", "aten::detach", "c10d")


def synchronize() -> None:
    """What `torch.cuda.synchronize()` does: all that was enqueued is done, and visible to all."""
    for group in list(groups):
        group.complete_all()


class guard(TorchDispatchMode):
    """Inside, on this thread, `wait()` orders the stream and never blocks the host.

    A torch operation on a buffer is of that stream: it lets the communication land first, or raises
    BufferRace before the `wait()`. What looks past torch, as another process or thread, or a
    handle, finds the poison until `synchronize()`.
    """

    def __enter__(self) -> guard:
        guard_depth(+1)
        self._leaves = _Leaves()
        self._leaves.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        guard_depth(-1)
        super().__exit__(*exception)
        self._leaves.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_flight() and not is_unguarded():
            with unguarded():
                for tensor, writes in _used(func, args, kwargs or {}):
                    _touch(tensor, str(func), writes=writes)
        return func(*args, **(kwargs or {}))


class _Leaves(TorchFunctionMode):
    """The ways out of the stream that wait for it on CUDA, such as `.tolist()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WAITING and not is_unguarded() and args and isinstance(args[0], Tensor):
            with unguarded():
                _touch(args[0], name, writes=False)
        return func(*args, **(kwargs or {}))


def _used(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors whose memory an operation uses, and whether it writes there."""
    if func.is_view or func._schema.name.startswith(_HARMLESS):
        return
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Tensor):
                yield one, writes


def _touch(tensor: Tensor, what: str, *, writes: bool) -> None:
    if tensor.layout is not torch.strided or not tensor.numel():
        return
    memory = extent(tensor)
    for operation in in_flight():
        for theirs, received in operation.extents():
            if not ((writes or received) and overlap(memory, theirs)):
                continue
            if not operation.waited:
                kind = "receive" if received else "send"
                verb = "written" if writes else "read"
                raise BufferRace(
                    f"rank {this_rank()}: the {kind} buffer of {operation} is {verb} by {what}"
                    f" before its wait(), at {call_site()}"
                )
            operation.communicator.complete(operation)
            break
