"""Actors of tests, in a module that workers can import: Ray sends classes by name."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.config import Config
from rlcore.data.batch import StepRollouts
from rlcore.data.sample import Sample, VersionSpan
from rlcore.launch.ray.actor_env import log_to
from rlcore.launch.ray.service_actor import ServiceActor


def config_of_a_run(**sections: dict[str, Any]) -> Config:
    """A minimal configuration; keyword arguments are whole sections, or more of `cluster`."""
    cluster = {"launcher": "ray", **sections.pop("cluster", {})}
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"paths": ["p"]},
            "training": {"steps": 1},
            "reward": {"parts": {"a": {"function": "exact_match"}}},
            "cluster": cluster,
            **sections,
        }
    )


class Service:
    def next_step(self) -> StepRollouts:
        return StepRollouts([sample(draw, 50_000) for draw in range(4)], {}, 0.0, {})


class Nobody:
    """An actor that only takes resources."""


def sample(draw: int, length: int) -> Sample:
    return Sample(
        draw,
        0,
        f"p:{draw}",
        draw,
        draw,
        np.arange(length, dtype=np.int32),
        np.array([0] + [1] * (length - 1), np.uint8),
        np.zeros(length - 1, np.float32),
        (VersionSpan(1, 0, length - 1),),
        "stop",
    )


class Hanging(ServiceActor):
    async def hang(self, log: Path) -> None:
        """Hang like native code that never gives the interpreter back."""
        log_to(log)
        ctypes.PyDLL(None).sleep(1000)
