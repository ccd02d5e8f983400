"""The speed of passes and steps of one model, beside the device's matmul."""

from __future__ import annotations

import torch
from one_gpu.ceilings import matmul_rate
from one_gpu.models import SHAPES
from one_gpu.profile_parts import time_by_part
from one_gpu.section import Found, Setting, seconds_of
from one_gpu.step import random_trainer


def train(setting: Setting) -> Found:
    """Passes and steps of one model. MFU is of the product's rate, measured just before."""
    found = Found()
    size = setting.size
    shape = SHAPES[setting.model]
    with random_trainer(
        setting, setting.model, packs=size.micro_batches, offload=True, recompute=setting.recompute
    ) as made:
        batch = made.batch
        found.numbers["chosen"] = made.backend.describe()
        rate = matmul_rate(setting)
        if setting.cuda:
            torch.cuda.reset_peak_memory_stats()
        made.assign()
        seconds = {
            name: seconds_of(work, size.rounds, cuda=setting.cuda)
            for name, work in (
                ("update", made.update),
                ("score", made.score),
                ("reference", lambda: made.score("reference")),
            )
        }
        peak = torch.cuda.max_memory_allocated() if setting.cuda else 0
        parts = time_by_part(made.update, cuda=setting.cuda)
    # an update: forward and backward
    tokens = sum(batch.lengths.tolist())
    flops = 3.0 * shape.sizes.forward_flops(batch.lengths.tolist(), batch.num_trainable)
    found.number("parameters", shape.sizes.parameters / 1e6, "M")
    found.number("tokens a step", tokens, "")
    for name, taken in seconds.items():
        found.number(name, taken, "s", f"{tokens / taken:.0f} tokens/s")
    found.number("MFU of an update", flops / seconds["update"] / rate, "", "of the product's rate")
    found.number("peak memory", peak / 2**30, "GiB")
    whole = sum(parts.values())
    for part, taken in parts.items():
        found.number(f"  of a profiled update: {part}", taken, "s", f"{taken / whole:.1%}")
    return found
