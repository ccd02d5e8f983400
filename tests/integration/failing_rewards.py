"""Rewards that go wrong. They need no torch: worker processes import this."""

from __future__ import annotations

import os
import time
from typing import Any

from rlcore.data.sample import Sample


def raises(sample: Sample) -> Any:
    raise KeyError("solution")


def two_arguments(sample: Sample, label: str) -> float:
    return 1.0


def dies(sample: Sample) -> Any:
    os._exit(3)


def hangs(sample: Sample) -> Any:
    time.sleep(1000)


WAYS = {
    0: lambda _: float("nan"),
    1: lambda _: "good",
    2: lambda _: None,
    3: raises,
    4: dies,
    5: hangs,
}


def one_way_each(sample: Sample) -> Any:
    """Fail in another way for each sample of a prompt; samples after the sixth get 1."""
    return WAYS.get(sample.index, lambda _: 1.0)(sample)


def slow(sample: Sample) -> float:
    time.sleep(0.05)
    return 1.0
