"""Engines on a cluster: an actor owns an engine's server; clients use the server's URL directly.

Actors belong to the driver, so that an engine outlives rank 0. When a node is lost, Ray starts its
actors elsewhere, and the service's fleet restarts their servers, as it does for any failed engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

import ray

from rlcore.config import Config
from rlcore.config.derived import hosted_engines
from rlcore.deadlines import END_SERVER_S
from rlcore.errors import DeadlineExceeded, RlcoreError
from rlcore.interfaces import RolloutEngine
from rlcore.launch.logs import log_folder
from rlcore.launch.process import route_to
from rlcore.launch.ray.calls import NAMESPACE, actor_name, answer, answer_when_up, enter_folder
from rollout.asyncio_utils import within
from rollout.engines.child_process import Server
from rollout.engines.factories import HostedFactory, Keys, engine_name, factory_of
from rollout.weight_sync.process_group import NODE, is_loopback, name_gpus

LOOPBACK = "127.0.0.1"
# Variables of rank 0 by which its rollout service joins the cluster on the same node.
ADDRESS = "RAY_ADDRESS"
NODE_ADDRESS = "RLCORE_NODE_ADDRESS"

logger = logging.getLogger(__name__)


class EngineHost:
    """The actor of one engine: starts, watches and ends its server, which never outlives it.

    Args:
        gpus: the names of the engine's GPUs; empty: the GPUs that Ray shows this process.
    """

    def __init__(
        self, folder: str, config: Config, index: int, keys: Keys, gpus: Sequence[str] = ()
    ) -> None:
        enter_folder(folder)
        os.environ[NODE] = ray.get_runtime_context().get_node_id()
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._gpus = name_gpus(gpus)
        self._server = _server(config, index, keys, gpus)
        # The newest start, which may be finished.
        self._starting: asyncio.Task[str] | None = None

    async def start(self) -> str:
        """Start the server, unless a lost service has started it already; return its URL."""
        ended = self._server.ended
        # A server that is starting counts as running.
        runs = ended is not None and not ended.done()
        if self._starting is None or (self._starting.done() and not runs):
            self._starting = asyncio.ensure_future(self._server.start())
        return await asyncio.shield(self._starting)

    async def wait_ended(self) -> str:
        """Wait until the server has ended; describe how, with the last lines of its log."""
        ended = self._server.ended
        if ended is not None:
            await asyncio.wait({ended})
        return self._server.describe_end()

    async def gpus(self) -> tuple[str, ...]:
        """Return the GPUs that the engine shares with the trainer, by `name_gpus`."""
        return self._gpus

    async def compiles(self) -> bool:
        """Return whether a compiler runs on this machine."""
        return await self._server.compiles()

    async def pid(self) -> int | None:
        """Return the server's process id."""
        return self._server.pid

    async def stop(self) -> None:
        """Ask the server to end, and wait."""
        await self._cancel_start()
        await self._server.stop()

    async def kill(self) -> None:
        """Kill the server."""
        await self._cancel_start()
        await self._server.kill()

    async def _cancel_start(self) -> None:
        """Cancel a start, which then ends the server."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})


def _server(config: Config, index: int, keys: Keys, gpus: Sequence[str]) -> Server:
    """Make a server, without starting it, that listens where other nodes reach it."""
    config = config.model_copy(deep=True)
    engine = config.rollout.engine
    if engine.host == LOOPBACK:
        engine.host = _address()
    factory: HostedFactory = factory_of(engine.kind)
    return factory.build_server(config, index, logs=log_folder(config.run), gpus=gpus, keys=keys)


def _address() -> str:
    """Return the address by which other nodes reach this one; its name may be loopback here."""
    mine = str(ray.util.get_node_ip_address())
    if is_loopback(mine) or not is_loopback(route_to(mine)):
        return mine
    nodes = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    return next((own for own in map(route_to, nodes) if not is_loopback(own)), mine)


class HostedServer:
    """The service's handle on the server of an `EngineHost`, for one event loop.

    Implements `rollout.engines.child_process.Server`.

    Args:
        placement_timeout_s: for the actor to be up, before the server's own deadline begins. Ray
            may need half a minute to detect a lost node, and then has to find another.
    """

    managed = True

    def __init__(self, host: Any, name: str, *, placement_timeout_s: float) -> None:
        self._host = host
        self.name = name
        self._placement_timeout_s = placement_timeout_s
        # Whether the host was asked to start the server.
        self._begun = False
        # The end of the newest start; None while the server is starting.
        self._ended: asyncio.Task[str] | None = None
        self.pid: int | None = None
        # Known once the server was started.
        self.gpus: tuple[str, ...] = ()

    async def start(self) -> str:
        """Start the server and return its URL.

        Raises the errors of `EngineHost.start`, and DeadlineExceeded if the cluster has no room.
        """
        engine = f"engine {self.name}"
        await within(
            self._placement_timeout_s,
            answer_when_up(self._host.pid.remote, what=engine),
            lambda: (
                f"{engine} has no process after {self._placement_timeout_s:g} s"
                " (cluster.start_timeout_s): the cluster has no room for it (`ray status`)"
            ),
        )
        self._begun = True
        self._ended = None
        url: str = await answer_when_up(self._host.start.remote, what=f"starting {engine}")
        self.pid = await answer_when_up(self._host.pid.remote, what=engine)
        self.gpus = await answer_when_up(self._host.gpus.remote, what=engine)
        self._ended = asyncio.ensure_future(self._until_ended())
        return url

    async def _until_ended(self) -> str:
        try:
            return str(await answer(self._host.wait_ended.remote(), what=f"engine {self.name}"))
        except RlcoreError as error:
            # The actor or its node is gone.
            return str(error)

    @property
    def ended(self) -> asyncio.Future[Any] | None:
        """The task that is done once the server or its actor has ended; None before the start."""
        return self._ended

    async def compiles(self) -> bool:
        """Ask the machine of the server."""
        try:
            return bool(await answer(self._host.compiles.remote(), what=f"engine {self.name}"))
        except RlcoreError:
            # The actor or its node is gone.
            return False

    def describe_end(self) -> str:
        """Describe the end of the server."""
        if self._ended is None or not self._ended.done():
            return "it still runs"
        return self._ended.result()

    async def stop(self) -> None:
        """Ask the server to end, and wait."""
        await self._end("stop")

    async def kill(self) -> None:
        """Kill the server."""
        await self._end("kill")

    async def _end(self, how: str) -> None:
        """Make the actor end the server; an actor that does not answer is killed and restarted."""
        if not self._begun or (self._ended is not None and self._ended.done()):
            return
        try:
            call = answer(getattr(self._host, how).remote(), what=f"engine {self.name}")
            await within(
                END_SERVER_S, call, lambda: f"the actor of engine {self.name} does not answer"
            )
        except DeadlineExceeded as error:
            logger.warning("%s; it is killed", error)
            ray.kill(self._host, no_restart=False)
        except RlcoreError as error:
            # No recovery is needed: the actor is gone.
            logger.info("%s", error)
        if self._ended is not None:
            await asyncio.wait({self._ended}, timeout=END_SERVER_S)


def host_name(run: str, index: int) -> str:
    """Return the name of an engine's actor."""
    return actor_name(run, engine_name(index))


def cluster_engines(config: Config) -> list[RolloutEngine]:
    """Make the engines of a run that are actors, without starting them.

    This process (the rollout service or rank 0) first joins the cluster, if necessary.
    """
    if not ray.is_initialized():
        ray.init(
            address=os.environ[ADDRESS],
            _node_ip_address=os.environ[NODE_ADDRESS],
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    limit_s = config.cluster.start_timeout_s
    servers = [
        HostedServer(
            ray.get_actor(host_name(config.run.name, index), namespace=NAMESPACE),
            engine_name(index),
            placement_timeout_s=limit_s,
        )
        for index in range(hosted_engines(config))
    ]
    factory: HostedFactory = factory_of(config.rollout.engine.kind)
    return list(factory.build_clients(config, servers, keys=Keys.from_environment()))
