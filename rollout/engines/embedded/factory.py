"""Builds embedded engines: in this process, or each in its own process."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlcore.config import Config
from rlcore.config.derived import embedded_in_trainer, published_adapters
from rlcore.errors import ConfigError
from rlcore.interfaces import RolloutEngine
from rlcore.tls import check_files
from rollout.engines.checks import ExpertLayers
from rollout.engines.child_process import (
    ChildServer,
    Server,
    engine_environment,
    with_this_checkout,
)
from rollout.engines.embedded.client import RemoteEngine
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.server import ServerConfig
from rollout.engines.factories import EngineSite, Keys, engine_log, engine_name
from rollout.weight_sync.process_group import name_gpus

COMMAND = (sys.executable, "-m", "rollout.engines.embedded.server")


class EmbeddedServer(ChildServer):
    """The `Server` of an embedded engine.

    Use it from one event loop, whose thread lives as long as the process.

    Args:
        gpus: names as in CUDA_VISIBLE_DEVICES; if empty, the process sees the same GPUs as we do.
    """

    def __init__(self, config: ServerConfig, log: Path, *, gpus: Sequence[str] = ()) -> None:
        super().__init__(config.name, log)
        self.config = config
        self._visible = tuple(gpus)
        self.gpus = name_gpus(gpus)

    async def warm_up(self) -> None:
        """Let the process import while the run reads its input. It writes no log before `start`."""
        await self.spawn(COMMAND, self._environment(), asyncio.subprocess.DEVNULL)

    async def start(self) -> str:
        """Return its URL. Raises RunFailed or DeadlineExceeded with the last lines of its log."""
        given = replace(self.config, parent_pid=os.getpid(), log=str(self.log))

        def config(ready_fd: int) -> bytes:
            return replace(given, ready_fd=ready_fd).to_json()

        engine = self.config.engine
        port = await self.launch(
            COMMAND, config, timeout_s=engine.start_timeout_s, environment=self._environment()
        )
        return f"{'http' if self.config.tls is None else 'https'}://{engine.host}:{port}"

    def _environment(self) -> dict[str, str]:
        engine = self.config.engine
        on_gpu = engine.device != "cpu" and torch.cuda.is_available()
        return with_this_checkout(engine_environment(engine, on_gpu=on_gpu, gpus=self._visible))


def adapter_alpha(config: Config) -> float | None:
    """`policy.lora.alpha` of a run that publishes adapters."""
    lora = published_adapters(config)
    return None if lora is None else lora.alpha


class EmbeddedFactory:
    """`rollout.engines.factories.HostedFactory` of embedded engines."""

    @classmethod
    def build(cls, site: EngineSite) -> Sequence[RolloutEngine]:
        """Return one engine in this process, for a debugger, if the rollout service is in the
        trainer's process; otherwise engines in their own processes and on their own GPUs.
        """
        config = site.config
        engine = config.rollout.engine
        if embedded_in_trainer(config):
            if engine.environment:
                raise ConfigError(
                    "rollout.engine.environment: the engine is in this process: leave it out, or"
                    " set rollout.service to process"
                )
            return [
                EmbeddedEngine(
                    config.model.path,
                    config=engine,
                    dtype=config.model.dtype,
                    tokenizer=config.model.tokenizer,
                    alpha=adapter_alpha(config),
                    fp32_head=config.policy.logprobs.fp32_head,
                    policies=config.rollout.policies,
                )
            ]
        keys = Keys(api=secrets.token_urlsafe(32), admin="")
        servers = [
            cls.build_server(config, index, logs=site.logs, gpus=gpus, keys=keys)
            for index, gpus in enumerate(site.assign_gpus())
        ]
        return cls.build_clients(config, servers, keys=keys)

    @classmethod
    def build_server(
        cls, config: Config, index: int, *, logs: Path, gpus: Sequence[str], keys: Keys
    ) -> EmbeddedServer:
        """See `HostedFactory`."""
        if config.cluster.tls is not None:
            check_files(config.cluster.tls)
        server = ServerConfig(
            engine_name(index),
            config.model.path,
            config.rollout.engine,
            keys.api,
            dtype=config.model.dtype,
            tokenizer=config.model.tokenizer,
            alpha=adapter_alpha(config),
            fp32_head=config.policy.logprobs.fp32_head,
            policies=config.rollout.policies,
            tls=config.cluster.tls,
        )
        return EmbeddedServer(server, engine_log(logs, index), gpus=gpus)

    @classmethod
    def build_clients(
        cls, config: Config, servers: Sequence[Server], *, keys: Keys
    ) -> list[RemoteEngine]:
        """See `HostedFactory`."""
        records = config.policy.routing_replay == "engine"
        experts = ExpertLayers.of(config.model.path) if records else None
        return [
            RemoteEngine(
                server,
                config=config.rollout.engine,
                key=keys.api,
                experts=experts,
                tls=config.cluster.tls,
            )
            for server in servers
        ]
