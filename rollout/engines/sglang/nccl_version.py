"""Compares NCCL of the trainer's and of the engines' environment, before an engine is started.

Ranks of different versions make no communicator: every publication over NCCL would fail.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass

from rlcore.deadlines import NCCL_VERSION_S
from rlcore.errors import ConfigError
from rollout.asyncio_utils import within

# Asks the library that is loaded: `torch.cuda.nccl.version()` is the one torch was compiled with.
PROBE = """
import ctypes, json, torch
number = ctypes.c_int()
try:
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    version = (number.value // 10000, number.value // 100 % 100, number.value % 100)
except (OSError, AttributeError):
    version = torch.cuda.nccl.version()[:3] if torch.version.cuda else ()
print(json.dumps({"nccl": ".".join(map(str, version)), "cuda": torch.version.cuda or ""}))
"""


@dataclass(frozen=True)
class NCCLVersion:
    """What an interpreter's torch uses; "" where it has none."""

    nccl: str
    cuda: str


async def check_nccl(engine: str, trainer: str = sys.executable) -> None:
    """Raise ConfigError unless both interpreters have the same NCCL."""
    theirs, ours = await asyncio.gather(nccl_version(engine), nccl_version(trainer))
    if theirs.nccl == ours.nccl != "":
        return
    package = f"nvidia-nccl-cu{ours.cuda.partition('.')[0] or '13'}"
    do = (
        f"run {trainer} -m pip install --no-deps {package}=={theirs.nccl}"
        if theirs.nccl
        else "install a torch with CUDA there (scripts/install_sglang.sh --gpu)"
    )
    raise ConfigError(
        f"rollout.engine.python: {engine} has NCCL {theirs.nccl or 'of no version'}, the trainer's"
        f" {trainer} has {ours.nccl or 'none'}, and weights go to engines over NCCL, which needs"
        f" the same version on both sides: {do}, or set rollout.engine.transport to disk"
    )


async def nccl_version(python: str) -> NCCLVersion:
    """Ask an interpreter. Raises ConfigError if it does not answer."""
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-W", "ignore", "-c", PROBE, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
    except OSError as error:
        raise ConfigError(f"rollout.engine.python: {python} cannot be run: {error}") from error
    try:
        late = f"rollout.engine.python: {python} did not tell its NCCL in {NCCL_VERSION_S:g} s"
        out, err = await within(NCCL_VERSION_S, process.communicate(), lambda: late)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return NCCLVersion(**json.loads(out.decode().splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        said = err.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError(
            f"rollout.engine.python: {python} cannot tell the NCCL of its torch: {said[0]}"
        ) from None
