"""Which engines a run has: embedded ones, SGLang servers that it starts, or servers that somebody
else runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlcore.config import Config
from rlcore.interfaces import RolloutEngine
from rlcore.launch.gpus import assign_gpus, names_of
from rlcore.launch.logs import folder_of
from rlcore.launch.process import Process
from rlcore.launch.environment import under_torchrun

if TYPE_CHECKING:
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.keys import Keys
    from rollout.engines.sglang.server_process import ManagedServer


def build_engines(config: Config, process: Process) -> list[RolloutEngine]:
    """Made, not started. One embedded engine is in this process where the run has no other, so that
    a debugger reaches it.

    Raises:
        ConfigError: no environment for SGLang, too few GPUs, or a server argument that is not the
            user's to set.
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
            log=engine_log(folder_of(config.run), index),
        )
        for index in range(engine.count)
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
    return [
        SGLangEngine(server, config=config.rollout.engine, keys=keys, model_path=config.model.path)
        for server in servers
    ]


def managed_servers(config: Config, keys: Keys, *, ranks: int, logs: Path) -> list[ManagedServer]:
    """Made, not started. `ranks`: trainer processes on this machine, which have its first GPUs; 0
    where there are none.
    """
    gpus = assign_gpus(config.rollout.engine, visible=torch.cuda.device_count(), ranks=ranks)
    return [
        managed_server(
            config, keys, index, logs=logs, gpus=names_of(chosen, os.environ), on_gpu=bool(chosen)
        )
        for index, chosen in enumerate(gpus)
    ]


def managed_server(
    config: Config, keys: Keys, index: int, *, logs: Path, gpus: Sequence[str], on_gpu: bool
) -> ManagedServer:
    """Engine `index`, made and not started, on GPUs of these names; none: on what is visible."""
    from rollout.engines.sglang.server_process import ManagedServer

    return ManagedServer(
        engine_name(index), config.model.path, config=config.rollout.engine, dtype=config.model.dtype,
        tokenizer=config.model.tokenizer, log=engine_log(logs, index), keys=keys, gpus=gpus,
        arguments=_arguments(config, on_gpu=on_gpu),
    )  # fmt: skip


def external_engines(config: Config) -> list[SGLangEngine]:
    """Those of `rollout.engine.urls`; keys are in the environment."""
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.external import ExternalServer
    from rollout.engines.sglang.keys import Keys

    engine = config.rollout.engine
    model = config.model.path
    keys = Keys.from_environment()
    servers = [
        ExternalServer(f"engine-{index}", url, model, config=engine, keys=keys)
        for index, url in enumerate(engine.urls)
    ]
    return [SGLangEngine(server, config=engine, keys=keys, model_path=model) for server in servers]


def _arguments(config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """Those of SGLang without which it does not do what the rest of the configuration asks for."""
    needed = {
        "enable_return_routed_experts": config.policy.routing_replay == "engine",
        # on a CPU there is nothing to release
        "enable_memory_saver": config.rollout.engine.colocated and on_gpu,
    }
    return {name: True for name, is_needed in needed.items() if is_needed}


def engine_name(index: int) -> str:
    """Of an engine that we start."""
    return f"engine-{index}"


def engine_log(logs: Path, index: int) -> Path:
    return logs / f"engine_{index}.log"
