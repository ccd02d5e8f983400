"""Actors of tests: in a module that workers can import, since Ray sends classes by their names."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from rlcore.data.sample import Sample, VersionSpan
from rlcore.launch.ray.service import ServiceActor
from rlcore.launch.ray.workplace import log_to
from rlcore.protocols import StepRollouts


class Service:
    def next_step(self) -> StepRollouts:
        return StepRollouts([sample(draw, 50_000) for draw in range(4)], {}, 0.0, {})


def sample(draw: int, length: int) -> Sample:
    return Sample(
        draw, 0, f"p:{draw}", draw, draw, np.arange(length, dtype=np.int32), np.array([0] + [1] * (length - 1), np.uint8),
        np.zeros(length - 1, np.float32), (VersionSpan(1, 0, length - 1),), "stop",
    )


class Hanging(ServiceActor):
    async def hang(self, log: Path) -> None:
        """As native code does that never gives the interpreter back."""
        log_to(log)
        ctypes.PyDLL(None).sleep(1000)
