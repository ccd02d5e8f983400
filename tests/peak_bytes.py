"""How much memory for tensors a piece of work takes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that `work` has allocated for tensors at one time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    now = 0
    peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
