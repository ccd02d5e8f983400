"""The device's ceilings: matmul and copies."""

from __future__ import annotations

import torch
from one_gpu.section import Found, Setting, seconds_of

CALLS = 20


def ceilings(setting: Setting) -> Found:
    """Rates of a large square product in the training dtype, and of copies."""
    found = Found()
    size = setting.size
    rate = matmul_rate(setting)
    found.number("matmul", rate / 1e12, "TFLOP/s", f"{size.matmul} squared, {size.dtype}")
    source = torch.empty(size.copied, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), size.rounds, cuda=setting.cuda)
    found.number("copy on the device", 2 * size.copied / seconds / 1e9, "GB/s", "read and written")
    host = torch.empty(size.copied // 4, dtype=torch.uint8, pin_memory=setting.cuda)
    part = target[: len(host)]
    for name, copy in (
        ("copy to the device", lambda: part.copy_(host)),
        ("copy to pinned host memory", lambda: host.copy_(part)),
    ):
        found.number(name, len(host) / seconds_of(copy, 3, cuda=setting.cuda) / 1e9, "GB/s")
    return found


def matmul_rate(setting: Setting) -> float:
    """FLOP/s of a large square product in the training dtype."""
    size = setting.size
    a, b = (
        torch.randn(size.matmul, size.matmul, device=setting.device, dtype=size.torch_dtype)
        for _ in range(2)
    )

    def several() -> None:
        for _ in range(CALLS):
            torch.mm(a, b)

    return CALLS * 2 * size.matmul**3 / seconds_of(several, 5, cuda=setting.cuda)
