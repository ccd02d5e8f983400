"""The server process of an embedded engine, a child of this process."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

from rlcore.config.sections.rollout import EngineConfig
from rollout.engines.child_process import Child, ChildServer
from rollout.engines.embedded.server import ServerConfig, config_json

MODULE = "rollout.engines.embedded.server"


class EmbeddedServer(ChildServer):
    """The `Server` of an embedded engine.

    Use it from one event loop, whose thread lives as long as the process shall.

    Args:
        key: every request must carry it.
        host: the address that it listens on.
    """

    def __init__(
        self,
        name: str,
        model_path: str,
        *,
        config: EngineConfig,
        dtype: str,
        tokenizer: str | None,
        log: Path,
        key: str,
        host: str = "127.0.0.1",
    ) -> None:
        self.name = name
        self.config = config
        self._settings = ServerConfig(
            name,
            model_path,
            tokenizer,
            dtype,
            config.model_dump(mode="json"),
            key=key,
            host=host,
            parent_pid=os.getpid(),
        )
        super().__init__(Child(f"engine {name}", log))

    async def start(self) -> str:
        """Return its URL. Raises RunFailed or DeadlineExceeded with the last lines of its log."""

        def config(ready_fd: int) -> bytes:
            return config_json(ServerConfig(**asdict(self._settings) | {"ready_fd": ready_fd}))

        port = await self._child.start(
            [sys.executable, "-m", MODULE], config, timeout_s=self.config.start_timeout_s
        )
        return f"http://{self._settings.host}:{port}"
