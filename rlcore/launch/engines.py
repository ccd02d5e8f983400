"""Which engines a run has: embedded ones, SGLang servers that it starts, or servers that somebody else runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlcore.config import Config
from rlcore.launch.gpus import assign_gpus, names_of
from rlcore.launch.logs import folder_of
from rlcore.launch.process import Process
from rlcore.launch.ranks import under_torchrun
from rlcore.protocols import RolloutEngine

if TYPE_CHECKING:
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.keys import Keys
    from rollout.engines.sglang.process import ManagedServer


def build_engines(config: Config, process: Process) -> list[RolloutEngine]:
    """Made, not started. One embedded engine is in this process where the run has no other, so that a debugger reaches it.

    Raises:
        ConfigError: no environment for SGLang, too few GPUs, or a server argument that is not the user's to set.
    """
    engine, model, tokenizer = config.rollout.engine, config.model.path, config.model.tokenizer
    if engine.kind == "sglang":
        ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else 1
        return [*external_engines(config)] if engine.urls else [*managed_engines(config, ranks=ranks)]
    in_process = process.world_size == 1 and engine.count == 1 if engine.in_process is None else engine.in_process
    if in_process:
        from rollout.engines.embedded import EmbeddedEngine

        return [EmbeddedEngine(model, config=engine, dtype=config.model.dtype, tokenizer=tokenizer)]
    from rollout.engines.remote import RemoteEngine

    return [
        RemoteEngine(model, config=engine, dtype=config.model.dtype, tokenizer=tokenizer, name=name, log=log)
        for name, log in _names(config, folder_of(config.run))
    ]


def managed_engines(config: Config, *, ranks: int) -> list[SGLangEngine]:
    """`rollout.engine.count` SGLang servers, with one pair of keys.

    Args:
        ranks: trainer processes on this machine, which have its first GPUs.
    """
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.keys import Keys

    keys = Keys.from_environment()
    servers = managed_servers(config, keys, ranks=ranks, logs=folder_of(config.run))
    return [SGLangEngine(server, config=config.rollout.engine, keys=keys, model_path=config.model.path) for server in servers]


def managed_servers(config: Config, keys: Keys, *, ranks: int, logs: Path) -> list[ManagedServer]:
    """Made, not started. `ranks`: trainer processes on this machine, which have its first GPUs; 0 where there are none."""
    from rollout.engines.sglang.process import ManagedServer

    engine = config.rollout.engine
    gpus = assign_gpus(engine, visible=torch.cuda.device_count(), ranks=ranks)
    return [
        ManagedServer(
            name, config.model.path, config=engine, dtype=config.model.dtype, tokenizer=config.model.tokenizer, log=log,
            keys=keys, gpus=names_of(chosen, os.environ), arguments=_arguments(config, on_gpu=bool(chosen)),
        )
        for (name, log), chosen in zip(_names(config, logs), gpus, strict=True)
    ]


def external_engines(config: Config) -> list[SGLangEngine]:
    """Those of `rollout.engine.urls`; keys are in the environment."""
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.external import ExternalServer
    from rollout.engines.sglang.keys import Keys

    engine, model, keys = config.rollout.engine, config.model.path, Keys.from_environment()
    servers = [
        ExternalServer(f"engine-{index}", url, model, config=engine, keys=keys) for index, url in enumerate(engine.urls)
    ]
    return [SGLangEngine(server, config=engine, keys=keys, model_path=model) for server in servers]


def _arguments(config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """Those of SGLang without which it does not do what the rest of the configuration asks for."""
    needed = {
        "enable_return_routed_experts": config.policy.routing_replay == "engine",
        "enable_memory_saver": config.rollout.engine.colocated and on_gpu,      # on a CPU there is nothing to release
    }
    return {name: True for name, is_needed in needed.items() if is_needed}


def _names(config: Config, logs: Path) -> list[tuple[str, Path]]:
    """The name and the log of each engine that we start."""
    return [(f"engine-{index}", logs / f"engine_{index}.log") for index in range(config.rollout.engine.count)]
