"""Offloading frees the device's memory, and a checkpoint in the background holds what it was of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from one_gpu.section import Found, Setting
from one_gpu.step import Trainer, random_trainer

SAVE_DEADLINE_S = 120.0
FREED = 0.95  # of the bytes that are offloaded; the allocator keeps what shares a segment


def check_memory(setting: Setting) -> Found:
    """Offload and load again, and save in the background while a step changes the weights."""
    found = Found()
    with random_trainer(setting, "0.5B", lr=1e-3) as made:
        made.assign()
        made.update()
        _offload(made, setting, found)
        _save(made, setting, found)
    return found


def _offload(made: Trainer, setting: Setting, found: Found) -> None:
    backend = made.backend
    before = made.weights()
    for label in ("first", "later"):
        backend.release_cache()
        free = _free_bytes(setting)
        seconds = _seconds_of(backend.offload, setting)
        offloaded = sum(tensors.num_bytes for tensors in backend._offloadable)
        freed = _free_bytes(setting) - free
        rate = f"{offloaded / seconds / 1e9:.3g} GB/s"
        if label == "first":
            rate += f", {freed / 2**30:.2f} of {offloaded / 2**30:.2f} GiB came free"
            if setting.cuda:
                stayed = 1 - freed / offloaded
                found.check("offload: share of the bytes that stayed", stayed, 1 - FREED)
        found.number(f"offload, {label}", seconds, "s", rate)
        seconds = _seconds_of(backend.onload, setting)
        found.number(f"onload, {label}", seconds, "s", f"{offloaded / seconds / 1e9:.3g} GB/s")
    found.check("offload and onload: largest change of a weight", _change(before, made), 0.0)
    backend.load_batch(made.batch, made.plans)  # `offload` dropped it
    made.assign()


def _seconds_of(work: Callable[[], None], setting: Setting) -> float:
    """One call, to the end of the device's work."""
    if setting.cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if setting.cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _save(made: Trainer, setting: Setting, found: Found) -> None:
    backend = made.backend
    folder = setting.work / "checkpoint"
    before = made.weights()
    began = time.perf_counter()
    backend.start_save(folder)
    found.number("a checkpoint's start", time.perf_counter() - began, "s", "training stands still")
    made.update()
    found.check(
        "a step during the save: weights that stayed", float(not _change(before, made)), 0.0
    )
    while (seconds := backend.save_seconds()) is None:
        if time.perf_counter() - began > SAVE_DEADLINE_S:
            raise TimeoutError(f"the checkpoint is not written after {SAVE_DEADLINE_S:.0f} s")
        time.sleep(0.01)
    backend.finish_save()
    found.number("a checkpoint's writing", seconds, "s", "in the background")
    backend.load(folder)
    found.check("loaded again: largest change of a weight", _change(before, made), 0.0)


def _change(before: dict[str, torch.Tensor], made: Trainer) -> float:
    now = made.weights()
    return max(float((now[name] - old).abs().max()) for name, old in before.items())


def _free_bytes(setting: Setting) -> int:
    return torch.cuda.mem_get_info()[0] if setting.cuda else 0
