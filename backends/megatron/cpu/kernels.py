"""The type of device whose kernels are chosen: in a dry run, of one that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_assumed: list[str] = []


def kernel_type(device: torch.device) -> str:
    """The type whose kernels serve `device`: its own, unless `assuming_kernels` says otherwise."""
    return _assumed[-1] if _assumed else device.type


def is_hopper(device: torch.device) -> bool:
    """Whether the kernels for compute capability 9 and more serve `device`, one of CUDA."""
    return bool(_assumed) or torch.cuda.get_device_capability(device)[0] >= 9


@contextmanager
def assuming_kernels(device_type: str) -> Iterator[None]:
    """Inside, the kernels of `device_type`, of CUDA for a Hopper, are chosen on every device."""
    _assumed.append(device_type)
    try:
        yield
    finally:
        _assumed.pop()
