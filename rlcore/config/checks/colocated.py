"""Checks of `rollout.engine.colocated` and `rollout.engine.gpus`. Pure, as all checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlcore.config.checks.servers import argument_name
from rlcore.config.derived import generates
from rlcore.config.messages import Problem
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.root import Config

COLOCATED = "rollout.engine.colocated"
SERVER = "rollout.engine.server"
# what a offloaded trainer keeps, its CUDA context and the buffers of NCCL, takes a GiB or two a
# process
MOST_OF_A_GPU = 0.85


def colocated(config: Config) -> Iterator[Problem]:
    """Trainer and engines that take turns have engines of their own, on one machine, and nothing to
    do at once.
    """
    engine = config.rollout.engine
    if not engine.colocated or not generates(config):
        return
    if engine.urls:
        yield Problem(
            COLOCATED,
            "engines given by rollout.engine.urls are somebody else's to stop and start: turn"
            " it off",
        )
    if (versions := config.rollout.max_staleness) > 0:
        message = (
            f"got {versions}, but engines that take turns with the trainer do not generate while it"
            " trains: set it to 0, "
        )
        yield Problem("rollout.max_staleness", message + f"or turn {COLOCATED} off")
    if config.cluster.nodes > 1:
        message = (
            f"got {config.cluster.nodes}, but {COLOCATED} engines are all started on the first one:"
            " use 1, or turn it off"
        )
        yield Problem("cluster.nodes", message)
    if engine.transport == "distributed":
        message = (
            "got 'distributed', but NCCL takes no two processes on one GPU: leave it at auto, which"
            " is 'tensor' here"
        )
        yield Problem("rollout.engine.transport", message)
    if server_argument(engine, "enable_memory_saver") is False:
        yield Problem(
            f"{SERVER}.enable_memory_saver", f"got false, but {COLOCATED} needs it: leave it out"
        )


def engine_gpus(config: Config) -> Iterator[Problem]:
    """An engine's GPUs are its own, and enough for its tensor-parallel ranks."""
    engine = config.rollout.engine
    if not engine.gpus:
        return
    if engine.device == "cpu":
        yield Problem(
            "rollout.engine.gpus",
            f"got {engine.gpus}, but rollout.engine.device is 'cpu': leave one of them out",
        )
    elif len(set(engine.gpus)) < len(engine.gpus):
        twice = next(gpu for gpu in engine.gpus if engine.gpus.count(gpu) > 1)
        yield Problem(
            "rollout.engine.gpus",
            f"{twice} is named twice: every rank of every engine needs a GPU of its own",
        )
    elif len(engine.gpus) < (needed := engine.count * engine.tensor_parallel):
        message = (
            f"got {len(engine.gpus)}, but count {engine.count} x tensor_parallel"
            f" {engine.tensor_parallel} need {needed}"
        )
        yield Problem("rollout.engine.gpus", message)


def colocated_notes(config: Config) -> Iterator[Problem]:
    """Yield a memory share that may not leave the trainer enough."""
    engine = config.rollout.engine
    share = server_argument(engine, "mem_fraction_static")
    if engine.colocated and isinstance(share, int | float) and share > MOST_OF_A_GPU:
        message = (
            f"{share:g} may be too much: a offloaded trainer keeps CUDA's context and NCCL's"
            " buffers, a GiB or two a process"
        )
        yield Problem(f"{SERVER}.mem_fraction_static", message)


def server_argument(engine: EngineConfig, name: str) -> Any:
    """Return the user's value of an SGLang argument, however it is spelled; None if not given."""
    for given, value in engine.server.items():
        if argument_name(given) == name:
            return value
    return None
