"""The engines of a run, built where the launcher says."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rlcore.config import Config
from rlcore.interfaces import RolloutEngine
from rlcore.launch.gpus import assign_gpus, names_of
from rlcore.launch.logs import folder_of
from rlcore.launch.process import Process
from rlcore.launch.ranks import under_torchrun
from rollout.engines.registry import EngineSite, factory_of


def build_engines(config: Config, process: Process) -> list[RolloutEngine]:
    """Build the engines of a run, without starting them; see the factory of their kind.

    Raises:
        ConfigError: the configuration asks in vain for an environment, a GPU or an argument.
    """
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else 1
    site = engine_site(
        config,
        world_size=process.world_size,
        local_ranks=local_ranks,
        logs=folder_of(config.run),
    )
    return list(factory_of(config.rollout.engine.kind).build(site))


def engine_site(config: Config, *, world_size: int, local_ranks: int, logs: Path) -> EngineSite:
    """This machine, for engines that are beside `local_ranks` processes of the trainer."""

    def gpus() -> list[list[str]]:
        assigned = assign_gpus(
            config.rollout.engine, visible=torch.cuda.device_count(), ranks=local_ranks
        )
        return [names_of(numbers, os.environ) for numbers in assigned]

    return EngineSite(config, world_size, local_ranks, logs, gpus)
