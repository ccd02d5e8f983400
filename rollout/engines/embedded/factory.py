"""Builds embedded engines: in this process, or each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.interfaces import RolloutEngine
from rollout.engines.child_process import Server
from rollout.engines.embedded.client import RemoteEngine
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.server_process import EmbeddedServer
from rollout.engines.registry import EngineSite, engine_log, engine_name

if TYPE_CHECKING:
    from rollout.engines.sglang.keys import Keys


class EmbeddedFactory:
    """`rollout.engines.registry.HostedFactory` of embedded engines."""

    @classmethod
    def build(cls, site: EngineSite) -> Sequence[RolloutEngine]:
        """Return one engine in this process where the run has no other process and no other engine,
        so that a debugger reaches it; else engines in processes of their own.
        """
        config = site.config
        engine = config.rollout.engine
        in_process = engine.in_process
        if in_process is None:
            in_process = site.world_size == 1 and engine.count == 1
        if in_process:
            return [
                EmbeddedEngine(
                    config.model.path,
                    config=engine,
                    dtype=config.model.dtype,
                    tokenizer=config.model.tokenizer,
                )
            ]
        return [
            RemoteEngine(
                config.model.path,
                config=engine,
                dtype=config.model.dtype,
                tokenizer=config.model.tokenizer,
                name=engine_name(index),
                log=engine_log(site.logs, index),
            )
            for index in range(engine.count)
        ]

    @classmethod
    def build_server(
        cls, config: Config, index: int, *, logs: Path, gpus: Sequence[str], keys: Keys
    ) -> EmbeddedServer:
        """See `HostedFactory`. The server takes the device that this process sees."""
        return EmbeddedServer(
            engine_name(index),
            config.model.path,
            config=config.rollout.engine,
            dtype=config.model.dtype,
            tokenizer=config.model.tokenizer,
            log=engine_log(logs, index),
            key=keys.api,
            host=config.rollout.engine.host,
        )

    @classmethod
    def build_clients(
        cls, config: Config, servers: Sequence[Server], *, keys: Keys
    ) -> list[RemoteEngine]:
        """See `HostedFactory`."""
        return [
            RemoteEngine(
                config.model.path,
                config=config.rollout.engine,
                dtype=config.model.dtype,
                name=server.name,
                server=server,
                key=keys.api,
            )
            for server in servers
        ]
