"""The engines in a publication, as rank 0 sees them: who takes part, and the verbs that a sink and its transports use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcore.data.generation import PauseMode
from rlcore.errors import EngineFailed, PublicationFailed
from rlcore.interfaces import RolloutEngine, WeightExpectation
from rlcore.launch.ray.calls import ActorLost
from rlcore.launch.ray.service import EngineFacts
from rlcore.launch.ray.service_client import ServiceClient
from rlcore.weights import Bucket
from rollout.weight_sync.process_group import GroupAddress


class RemoteParticipants:
    """`rollout.weight_sync.publication.Participants`."""

    def __init__(self, line: ServiceClient) -> None:
        self._line = line
        self._engines: dict[str, RemoteEngineHandle] = {}

    async def candidates(self) -> Sequence[RolloutEngine]:
        return await self._asked("candidates")

    async def stale(self) -> Sequence[RolloutEngine]:
        return await self._asked("stale")

    async def _asked(self, method: str) -> Sequence[Any]:
        try:
            found = await self._line.answer("members", method)
        except ActorLost:
            await asyncio.to_thread(self._line.revive)
            found = await self._line.answer("members", method)
        return [self._known(facts) for facts in found]

    def _known(self, facts: EngineFacts) -> RemoteEngineHandle:
        """One object an engine: transports remember their connections by it."""
        member = self._engines.setdefault(facts.name, RemoteEngineHandle(self._line, facts))
        member.facts = facts
        return member

    def draining(self, engine: RolloutEngine) -> None:
        self._line.say("draining", engine.name)

    def published(self, engine: RolloutEngine, version: int) -> None:
        self._line.say("published", engine.name, version)

    def missed(self, engine: RolloutEngine) -> None:
        self._line.say("missed", engine.name)

    async def out(self, engine: RolloutEngine, why: str) -> None:
        try:
            await self._line.answer("told", "out", engine.name, why)
        except ActorLost:       # recovery: the next attempt finds the engine as the new service does
            return


class RemoteEngineHandle:
    """An engine in a publication: the verbs that a sink and its transports use."""

    def __init__(self, line: ServiceClient, facts: EngineFacts) -> None:
        self._line, self.facts = line, facts

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def managed(self) -> bool:
        return self.facts.managed

    @property
    def transports(self) -> tuple[str, ...]:
        return self.facts.transports

    @property
    def url(self) -> str:
        return self.facts.url

    @property
    def group_ranks(self) -> int:
        return self.facts.group_ranks

    @property
    def in_group(self) -> str | None:
        return self.facts.in_group

    def expectation(self) -> WeightExpectation:
        """Raises PublicationFailed where the service is gone: the next attempt finds another one."""
        try:
            found: WeightExpectation = self._line.ask("expectation", self.name)
        except ActorLost as error:
            raise PublicationFailed(f"engine {self.name}: {error}") from error
        return found

    async def health(self) -> Any:
        return await self._verb("health")

    async def pause(self, mode: PauseMode) -> None:
        await self._verb("pause", mode)

    async def resume(self) -> None:
        await self._verb("resume")

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        await self._verb("begin_update", buckets)

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        await self._verb("join_group", address, rank)
        self.facts = replace(self.facts, in_group=address.name)

    async def receive_bucket(self, index: int, flat: Tensor | None) -> None:
        await self._verb("receive_bucket", index, flat)

    async def receive_serialized(self, index: int, payloads: Sequence[str]) -> None:
        await self._verb("receive_serialized", index, payloads)

    async def load_folder(self, folder: Path) -> None:
        await self._verb("load_folder", folder)

    async def end_update(self) -> None:
        await self._verb("end_update")

    async def set_version(self, version: int) -> None:
        await self._verb("set_version", version)

    async def checksum(self) -> Any:
        return await self._verb("checksum")

    async def _verb(self, verb: str, *arguments: Any) -> Any:
        """Raises EngineFailed, too, where the service is gone: nobody can speak for the engine."""
        try:
            return await self._line.answer("engine", self.name, verb, *arguments)
        except ActorLost as error:
            raise EngineFailed(f"engine {self.name}: {error}") from error
