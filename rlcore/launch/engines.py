"""Builds the engines of a run: embedded ones, SGLang servers that it starts, or given servers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlcore.config import Config
from rlcore.interfaces import RolloutEngine
from rlcore.launch.environment import under_torchrun
from rlcore.launch.gpus import assign_gpus, visible_names
from rlcore.launch.logs import log_folder
from rlcore.launch.process import Process

if TYPE_CHECKING:
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.keys import Keys
    from rollout.engines.sglang.server_process import ManagedServer


def build_engines(config: Config, process: Process) -> list[RolloutEngine]:
    """Make the engines, without starting them.

    An embedded engine without others is in this process, where a debugger reaches it.

    Raises:
        ConfigError: there is no environment for SGLang, there are too few GPUs, or a server
            argument is given that the user may not set.
    """
    engine = config.rollout.engine
    model = config.model.path
    tokenizer = config.model.tokenizer
    if engine.kind == "sglang":
        ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else 1
        return (
            [*external_engines(config)] if engine.urls else [*managed_engines(config, ranks=ranks)]
        )
    in_process = (
        process.world_size == 1 and engine.count == 1
        if engine.in_process is None
        else engine.in_process
    )
    if in_process:
        from rollout.engines.embedded.engine import EmbeddedEngine

        return [EmbeddedEngine(model, config=engine, dtype=config.model.dtype, tokenizer=tokenizer)]
    from rollout.engines.embedded.client import RemoteEngine

    return [
        RemoteEngine(
            model,
            config=engine,
            dtype=config.model.dtype,
            tokenizer=tokenizer,
            name=engine_name(index),
            log=engine_log(log_folder(config.run), index),
        )
        for index in range(engine.count)
    ]


def managed_engines(config: Config, *, ranks: int) -> list[SGLangEngine]:
    """Make `rollout.engine.count` SGLang engines with one pair of keys, without starting them.

    Args:
        ranks: the number of trainer processes on this machine, which have its first GPUs.
    """
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.keys import Keys

    keys = Keys.from_environment()
    servers = managed_servers(config, keys, ranks=ranks, logs=log_folder(config.run))
    return [
        SGLangEngine(server, config=config.rollout.engine, keys=keys, model_path=config.model.path)
        for server in servers
    ]


def managed_servers(config: Config, keys: Keys, *, ranks: int, logs: Path) -> list[ManagedServer]:
    """Make SGLang servers; `ranks` trainer processes have this machine's first GPUs."""
    gpus = assign_gpus(config.rollout.engine, visible=torch.cuda.device_count(), ranks=ranks)
    return [
        managed_server(
            config,
            keys,
            index,
            logs=logs,
            gpus=visible_names(chosen, os.environ),
            on_gpu=bool(chosen),
        )
        for index, chosen in enumerate(gpus)
    ]


def managed_server(
    config: Config, keys: Keys, index: int, *, logs: Path, gpus: Sequence[str], on_gpu: bool
) -> ManagedServer:
    """Make the server of engine `index` on the named `gpus`, or on all visible ones."""
    from rollout.engines.sglang.server_process import ManagedServer

    return ManagedServer(
        engine_name(index),
        config.model.path,
        config=config.rollout.engine,
        dtype=config.model.dtype,
        tokenizer=config.model.tokenizer,
        log=engine_log(logs, index),
        keys=keys,
        gpus=gpus,
        arguments=_arguments(config, on_gpu=on_gpu),
    )


def external_engines(config: Config) -> list[SGLangEngine]:
    """Make engines for the servers of `rollout.engine.urls`; keys are in the environment."""
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.external import ExternalServer
    from rollout.engines.sglang.keys import Keys

    engine = config.rollout.engine
    model = config.model.path
    keys = Keys.from_environment()
    servers = [
        ExternalServer(engine_name(index), url, model, config=engine, keys=keys)
        for index, url in enumerate(engine.urls)
    ]
    return [SGLangEngine(server, config=engine, keys=keys, model_path=model) for server in servers]


def _arguments(config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """Arguments of SGLang that other parts of the configuration need."""
    needed = {
        "enable_return_routed_experts": config.policy.routing_replay == "engine",
        # On a CPU there is no memory to release.
        "enable_memory_saver": config.rollout.engine.colocated and on_gpu,
    }
    return {name: True for name, is_needed in needed.items() if is_needed}


def engine_name(index: int) -> str:
    """The name of an engine in logs and metrics."""
    return f"engine-{index}"


def engine_log(logs: Path, index: int) -> Path:
    """The log file of an engine's process."""
    return logs / f"engine_{index}.log"
