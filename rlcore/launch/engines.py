"""Which engines a run has: embedded ones, SGLang servers that it starts, or servers that somebody else runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.launch.process import Process
from rlcore.protocols import RolloutEngine

if TYPE_CHECKING:
    from rollout.engines.sglang.engine import SGLangEngine


def build_engines(config: Config, process: Process) -> list[RolloutEngine]:
    """Made, not started. One embedded engine is in this process where the run has no other, so that a debugger reaches it.

    Raises:
        ConfigError: no environment for SGLang; a server argument that is not the user's to set.
    """
    engine, model, tokenizer = config.rollout.engine, config.model.path, config.model.tokenizer
    if engine.kind == "sglang":
        return [*external_engines(config)] if engine.urls else [*managed_engines(config)]
    in_process = process.world_size == 1 and engine.count == 1 if engine.in_process is None else engine.in_process
    if in_process:
        from rollout.engines.embedded import EmbeddedEngine

        return [EmbeddedEngine(model, config=engine, dtype=config.model.dtype, tokenizer=tokenizer)]
    from rollout.engines.remote import RemoteEngine

    return [
        RemoteEngine(model, config=engine, dtype=config.model.dtype, tokenizer=tokenizer, name=name, log=log)
        for name, log in _names(config)
    ]


def managed_engines(config: Config) -> list[SGLangEngine]:
    """`rollout.engine.count` SGLang servers, with one pair of keys."""
    from rollout.engines.sglang.engine import SGLangEngine
    from rollout.engines.sglang.keys import Keys
    from rollout.engines.sglang.process import ManagedServer

    engine, model, keys = config.rollout.engine, config.model.path, Keys.from_environment()
    servers = [
        ManagedServer(
            name, model, config=engine, dtype=config.model.dtype, tokenizer=config.model.tokenizer, log=log, keys=keys,
            arguments=_recording(config),
        )
        for name, log in _names(config)
    ]
    return [SGLangEngine(server, config=engine, keys=keys, model_path=model) for server in servers]


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


def _recording(config: Config) -> dict[str, Any]:
    """SGLang's arguments without which it does not record what the trainer asks for."""
    return {"enable_return_routed_experts": True} if config.policy.routing_replay == "engine" else {}


def _names(config: Config) -> list[tuple[str, Path]]:
    """The name and the log of each engine that the run starts."""
    logs = Path(config.run.dir) / config.run.name / "logs"
    return [(f"engine-{index}", logs / f"engine_{index}.log") for index in range(config.rollout.engine.count)]
