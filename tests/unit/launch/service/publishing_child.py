"""A child of `ServiceProcess` whose service has engines that receive weights, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

from rlcore.boundary.process_tree import die_with_parent
from rlcore.launch.service import frames
from rlcore.launch.service.child import Connection, ServiceHost, _serve
from rollout.asyncio_utils import LoopThread
from rollout.fleet.publication import WeightPublication
from tests.gloo_engine import GlooEngine
from tests.static_participants import StaticParticipants


class Host(ServiceHost):
    async def open(self) -> Any:
        thread = LoopThread("rollout")
        engines = [GlooEngine(f"engine-{i}", queues=i == 0) for i in range(2)]
        fleet: Any = StaticParticipants(engines)  # type: ignore[arg-type]
        service: Any = SimpleNamespace(
            publication=WeightPublication(self._config, fleet),
            loop=thread.loop,
            received=lambda: [engine.received for engine in engines],
            close=lambda: None,
        )
        self._service = service
        return os.getpid()


def main() -> None:
    die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(socket.socket(fileno=descriptor))
    log: Any = None
    asyncio.run(_serve(connection, Host(frames.receive(connection.socket), log)))


if __name__ == "__main__":
    main()
