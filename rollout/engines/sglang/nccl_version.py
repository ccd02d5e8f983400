"""Compares NCCL of the trainer's and of the engines' environment, before an engine is started.

Ranks of different versions make no communicator: every publication over NCCL would fail.
"""

from __future__ import annotations

import asyncio
import sys

from rlcore.errors import ConfigError
from rlcore.interpreters.ask import Interpreter, ask


async def check_nccl(engine: str, trainer: str = sys.executable) -> None:
    """Raise ConfigError unless both interpreters have the same NCCL."""
    theirs, ours = await asyncio.gather(_asked(engine), _asked(trainer))
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


async def _asked(python: str) -> Interpreter:
    """Ask an interpreter. Raises ConfigError if it does not answer, or its torch is broken."""
    told = await asyncio.to_thread(ask, python, [])
    if told.broken:
        raise ConfigError(
            f"rollout.engine.python: {python} does not tell the NCCL of its torch: {told.broken}"
        )
    return told
