"""The engines of a run, built where the launcher says."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rlcore.config import Config
from rlcore.interfaces import RolloutEngine
from rlcore.launch.environment import under_torchrun
from rlcore.launch.gpus import assign_gpus, visible_names
from rlcore.launch.logs import log_folder
from rlcore.launch.process import Process
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
        logs=log_folder(config.run),
    )
    return list(factory_of(config.rollout.engine.kind).build(site))


def engine_site(config: Config, *, world_size: int, local_ranks: int, logs: Path) -> EngineSite:
    """This machine, for engines that are beside `local_ranks` processes of the trainer."""

    def gpus() -> list[list[str]]:
        assigned = assign_gpus(
            config.rollout.engine, visible=torch.cuda.device_count(), ranks=local_ranks
        )
        return [visible_names(numbers, os.environ) for numbers in assigned]

    return EngineSite(config, world_size, local_ranks, logs, gpus)
