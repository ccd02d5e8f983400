"""The memory of tensors, as a kernel of NCCL sees it: bytes, extents, and who called."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

Extent = tuple[int, int]  # first and last address of memory, the last not included

_HERE = os.path.dirname(__file__)
_PROGRAMS = ("rule_", "test_")  # of the files beside this one
_PRIVATE = (
    "/torch/", "contextlib.py", "threading.py", "/tests/interpreters.py", "/tests/fork_server.py",
    "<frozen runpy>",
)  # fmt: skip
_CALLERS = 3  # lines of a call's place in an error
_state = threading.local()


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: uint8 [n], a view outside of autograd."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def extent(tensor: Tensor) -> Extent:
    """The memory between a strided tensor's first and last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def overlap(one: Extent, other: Extent) -> bool:
    """Whether two pieces of memory share a byte."""
    return one[0] < other[1] and other[0] < one[1]


def poison(tensor: Tensor) -> None:
    """Fill a receive buffer with what no one may read: NaN, or 0xA5 in each byte.

    The version counter of autograd does not move, as under a kernel of NCCL.
    """
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.data.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.data.logical_not_()
    else:
        raw(tensor).data.fill_(0xA5)


def signature(tensor: Tensor) -> str:
    """What the members of a communicator must have in common."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"


def call_site() -> str:
    """The innermost lines of the program under test."""
    frame = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < _CALLERS:
        if is_of_the_program(frame.f_code.co_filename):
            name = os.path.basename(frame.f_code.co_filename)
            lines.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


def is_of_the_program(filename: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    folder, name = os.path.split(filename)
    if folder == _HERE:
        return name.startswith(_PROGRAMS)
    return not any(part in filename for part in _PRIVATE)


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Inside, on this thread, tensors are touched by the backend itself."""
    before = getattr(_state, "unguarded", False)
    _state.unguarded = True
    try:
        yield
    finally:
        _state.unguarded = before


def is_unguarded() -> bool:
    """Whether this thread is inside `unguarded`."""
    return getattr(_state, "unguarded", False)
