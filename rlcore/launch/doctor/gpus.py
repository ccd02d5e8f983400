"""The driver and the GPUs, as nvidia-smi tells of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from rlcore.deadlines import NVIDIA_SMI_S
from rlcore.interpreters.ask import Interpreter
from rlcore.launch.doctor.finding import Finding, Level, gib
from rlcore.launch.doctor.needs import Needs

FIELDS = "name,memory.total,memory.free,driver_version"
LEAST_DRIVER = {"12": 525, "13": 580}  # major version of CUDA -> of the driver
MOSTLY_FREE = 0.9  # of a GPU's memory, or somebody else is on it


@dataclass(frozen=True)
class GPU:
    """One GPU of this machine; memory in bytes."""

    name: str
    memory: int
    free: int
    driver: str


def list_gpus() -> list[GPU]:
    """The GPUs of this machine, as far as `nvidia-smi` knows of them. Raises RuntimeError."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"nvidia-smi: {error}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[:1] or ["it said nothing"]
        raise RuntimeError(f"nvidia-smi ended with {done.returncode}: {said[0]}")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [GPU(row[0], _bytes(row[1]), _bytes(row[2]), row[3]) for row in rows if len(row) == 4]


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) << 20 if mebibytes.isdecimal() else 0  # "[N/A]" of unified memory


def gpus(needs: Needs, trainer: Interpreter) -> Iterator[Finding]:
    """The driver, the number of GPUs, and whether torch sees them."""
    try:
        found = list_gpus()
    except RuntimeError as error:
        advice = "mend the driver; a run would be on the CPU"
        yield Finding("FAIL", "GPUs", str(error), "a working driver, or none", advice)
        return
    if not found:
        seen = f"torch sees {trainer.gpus}, there is no nvidia-smi"
        yield Finding("ok", "GPUs", seen if trainer.gpus else "none; a run is on the CPU")
        return
    kinds = ", ".join(sorted({gpu.name for gpu in found}))
    free = min(gpu.free for gpu in found)
    yield from _driver(found[0], trainer)
    named = f"{len(found)} x {kinds}, {gib(found[0].memory)}"
    if not trainer.broken and not trainer.gpus:
        why = "is built for the CPU" if not trainer.cuda else "sees none of them"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        advice = "install a torch for this driver's CUDA; look at CUDA_VISIBLE_DEVICES"
        level: Level = "note" if hidden else "FAIL"  # on purpose: a run is on the CPU then
        yield Finding(level, "GPUs", f"{named}; torch {why}", "a torch that uses them", advice)
        return
    visible = trainer.gpus or len(found)
    wanted = needs.ranks + needs.engine_gpus
    if needs.configured and visible < wanted:
        needed = f"{needs.ranks} for trainer processes and {needs.engine_gpus} for engines"
        advice = "fewer processes_per_node or engines, smaller ones, or rollout.engine.colocated"
        yield Finding("FAIL", "GPUs", f"{named}; {visible} are visible", needed, advice)
        return
    trainers = needs.ranks * needs.nodes
    if needs.shared_gpus > trainers:
        found_ranks = f"{trainers} trainer processes"
        needed = f"{needs.shared_gpus} for colocated engines (count x tensor_parallel)"
        advice = "fewer or smaller engines: each GPU of one has a trainer process"
        yield Finding("FAIL", "GPUs", f"{named}; {found_ranks}", needed, advice)
        return
    taken = [index for index, gpu in enumerate(found) if gpu.free < MOSTLY_FREE * gpu.memory]
    advice = f"GPUs {', '.join(map(str, taken))} are in use: see nvidia-smi" if taken else ""
    yield Finding("note" if taken else "ok", "GPUs", f"{named}, least free {gib(free)}", "", advice)


def _driver(gpu: GPU, trainer: Interpreter) -> Iterator[Finding]:
    major = trainer.cuda.partition(".")[0]
    least = LEAST_DRIVER.get(major, 0)
    number = gpu.driver.partition(".")[0]
    found = f"{gpu.driver}; torch is built for CUDA {trainer.cuda or 'none'}"
    if number.isdecimal() and int(number) < least:
        advice = f"a newer driver, or a torch for CUDA {int(major) - 1}"
        needed = f"driver {least} or newer for CUDA {major}"
        yield Finding("FAIL", "driver", found, needed, advice)
    else:
        yield Finding("ok", "driver", found)
