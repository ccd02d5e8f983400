"""The device type that kernels are chosen for; in a dry run this device need not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_assumed: list[str] = []


def kernel_type(device: torch.device) -> str:
    """The device type whose kernels serve `device`: its own, except in `assuming_kernels`."""
    return _assumed[-1] if _assumed else device.type


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for compute capability 9 and more serve `device`, a CUDA device."""
    return bool(_assumed) or torch.cuda.get_device_capability(device)[0] >= 9


@contextmanager
def assuming_kernels(device_type: str) -> Iterator[None]:
    """Inside, every device gets the kernels of `device_type`; for CUDA, those of a Hopper."""
    _assumed.append(device_type)
    try:
        yield
    finally:
        _assumed.pop()
