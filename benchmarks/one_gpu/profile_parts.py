"""Splits the time of a step: each operation of a profile counts for a part of the model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# In this order: an operation belongs to the first part that it or something around it matches.
PARTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("head", r"FusedLogprobs"),
        ("attention", r"varlen_attn|flash_attention|scaled_?dot_?product"),
        ("optimizer", r"Optimizer\.step|multi_tensor|aten::_(fused_adam|foreach)"),
        ("embedding", r"embedding"),
        ("linear", r"aten::(mm|addmm|bmm|linear|matmul)$"),
        ("norm", r"rms_?norm"),
        ("rotary, activation", r"_Rotation|_SwiGLU|silu"),
        ("collectives", r"nccl|gloo|c10d"),
        (
            "copies, sums of gradients",
            r"aten::(copy_|add_|_to_copy|index_select|index|cat|zero_|fill_)$",
        ),
    )
)


def time_by_part(step: Callable[[], Any], *, cuda: bool) -> dict[str, float]:
    """Seconds of device time (on the CPU: of CPU time) of each part in one call of `step`; "other"
    is the rest.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    seconds: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        if event.device_type != DeviceType.CPU:  # kernels are counted where they were launched
            continue
        own = event.self_device_time_total if cuda else event.self_cpu_time_total
        if own:
            seconds[_part(event)] += own * 1e-6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _part(event: Any) -> str:
    around = []
    while event is not None:
        around.append(str(event.name))
        event = event.cpu_parent
    return next(
        (name for name, pattern in PARTS if any(pattern.search(text) for text in around)), "other"
    )
