"""The server process of an embedded engine, started and ended by us on this machine."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path

from rlcore.config.sections.rollout import EngineConfig
from rollout.engines.child_process import Child, ChildServer
from rollout.engines.embedded.server import ServerConfig, config_json

MODULE = "rollout.engines.embedded.server"


class EmbeddedServer(ChildServer):
    """`rollout.engines.embedded.client.EngineProcess`. Use it from one event loop, whose thread
    lives as long as the process shall.

    Args:
        key: every request must carry it; default: a new one.
        host: the address that it listens on.
    """

    def __init__(
        self, name: str, model_path: str, *, config: EngineConfig, dtype: str, tokenizer: str | None, log: Path,
        key: str | None = None, host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self.name = name
        self.config = config
        self.key = key or secrets.token_urlsafe(32)
        self._told = ServerConfig(
            name,
            model_path,
            tokenizer,
            dtype,
            config.model_dump(mode="json"),
            key=self.key,
            host=host,
            parent_pid=os.getpid(),
        )
        super().__init__(Child(f"engine {name}", log))

    async def start(self) -> str:
        """Raises RunFailed or DeadlineExceeded with the last lines of the process's log."""

        def config(ready_fd: int) -> bytes:
            return config_json(ServerConfig(**asdict(self._told) | {"ready_fd": ready_fd}))

        port = await self._child.start(
            [sys.executable, "-m", MODULE], config, timeout_s=self.config.start_timeout_s
        )
        return f"http://{self._told.host}:{port}"
