"""The type of device whose kernels are chosen: in a dry run, of one that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_assumed: list[str] = []


def kernel_type(device: torch.device) -> str:
    """The type whose kernels serve `device`: its own, unless `assuming_kernels` says otherwise."""
    return _assumed[-1] if _assumed else device.type


@contextmanager
def assuming_kernels(device_type: str) -> Iterator[None]:
    """Inside, the kernels of `device_type` are chosen on every device."""
    _assumed.append(device_type)
    try:
        yield
    finally:
        _assumed.pop()
