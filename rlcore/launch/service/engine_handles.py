"""The engines of a remote rollout service, as a publication in rank 0 uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rlcore.errors import EngineFailed
from rlcore.interfaces import RolloutEngine
from rlcore.launch.service.client import ServiceClient
from rlcore.launch.service.host import EngineInfo
from rlcore.launch.service.process import ServiceLost
from rollout.weight_sync.process_group import GroupAddress


class RemoteParticipants:
    """Implements `rollout.weight_sync.publication.Participants`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._engines: dict[str, RemoteEngineHandle] = {}

    async def candidates(self) -> Sequence[RolloutEngine]:
        """Implements the protocol; of the replacement if the service has died."""
        return await self._participants("candidates")

    async def stale(self) -> Sequence[RolloutEngine]:
        """Implements the protocol; of the replacement if the service has died."""
        return await self._participants("stale")

    async def _participants(self, method: str) -> Sequence[Any]:
        try:
            found = await self._client.call_async("participants", method)
        except ServiceLost:
            await asyncio.to_thread(self._client.reopen)
            found = await self._client.call_async("participants", method)
        names = {info.name for info in found}
        if method == "candidates":  # the others do not run, or have left, and are in no group
            for name in self._engines.keys() - names:
                self._engines[name].in_group = None
        return [self._handle(info) for info in found]

    def _handle(self, info: EngineInfo) -> RemoteEngineHandle:
        """Return the one handle of an engine, by which transports know their connections."""
        handle = self._engines.setdefault(info.name, RemoteEngineHandle(self._client, info))
        handle.update(info)
        return handle

    def draining(self, engine: RolloutEngine) -> None:
        """Implements the protocol."""
        self._client.notify("draining", engine.name)

    def published(self, engine: RolloutEngine, version: int) -> None:
        """Implements the protocol."""
        self._client.notify("published", engine.name, version)

    def missed(self, engine: RolloutEngine) -> None:
        """Implements the protocol."""
        self._client.notify("missed", engine.name)

    async def out(self, engine: RolloutEngine, why: str) -> None:
        """Implements the protocol; a service that is lost has no engines to hold up."""
        try:
            await self._client.call_async("notify", "out", engine.name, why)
        # recovery: the next attempt finds the engine as the new service does
        except ServiceLost:
            return


def _remote(verb: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make the method of `RemoteEngineHandle` that calls `verb` of its engine in the service."""

    async def call(handle: RemoteEngineHandle, *arguments: Any) -> Any:
        return await handle.call(verb, *arguments)

    return call


class RemoteEngineHandle:
    """The methods of an engine that a publication and its transports use."""

    def __init__(self, client: ServiceClient, info: EngineInfo) -> None:
        self._client = client
        self.update(info)

    def update(self, info: EngineInfo) -> None:
        """Take what the service says of the engine now."""
        self.name = info.name
        self.managed = info.managed
        self.transports = info.transports
        self.url = info.url
        self.group_ranks = info.group_ranks
        self.in_group = info.in_group
        self.gpus = info.gpus
        self.digests_weights = info.digests_weights
        self.queues_buckets = info.queues_buckets

    health = _remote("health")
    pause = _remote("pause")
    resume = _remote("resume")
    begin_update = _remote("begin_update")
    receive_bucket = _remote("receive_bucket")
    received_digests = _remote("received_digests")
    receive_serialized = _remote("receive_serialized")
    load_folder = _remote("load_folder")
    end_update = _remote("end_update")
    set_version = _remote("set_version")

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        """Let the engine join the process group for weights."""
        await self.call("join_group", address, rank)
        self.in_group = address.name

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Call a method of the engine. Raises EngineFailed where it or the service is gone."""
        try:
            return await self._client.call_async("engine", self.name, verb, *arguments)
        except ServiceLost as error:
            raise EngineFailed(f"engine {self.name}: {error}") from error
