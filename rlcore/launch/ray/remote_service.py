"""The rollout service as rank 0 uses it under Ray: samples, publication, and engine memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.data.batch import StepRollouts
from rlcore.data.generation import MemoryTag
from rlcore.data.sample import Sample
from rlcore.deadlines import SERVICE_GRACE_S
from rlcore.errors import EngineFailed, PublicationFailed
from rlcore.interfaces import RolloutEngine, WeightVerifier
from rlcore.launch.compose import OpenService, RolloutHandles, all_engines_timeout_s
from rlcore.launch.process import Process
from rlcore.launch.ray.calls import ActorLost
from rlcore.launch.ray.service_actor import EngineInfo
from rlcore.launch.ray.service_client import ServiceClient
from rollout.asyncio_utils import LoopThread
from rollout.weight_sync.process_group import GroupAddress
from rollout.weight_sync.publication import WeightPublication

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def opener(actor: Any) -> OpenService:
    """Return what opens the service of `actor`, a Ray handle, for rank 0."""

    def open_service(
        config: Config,
        process: Process,
        tokenizer: PreTrainedTokenizerBase,
        stack: ExitStack,
        *,
        greedy_baseline: bool,
    ) -> RolloutHandles:
        client = ServiceClient(actor, config, greedy_baseline=greedy_baseline)
        opened = client.open()
        thread = LoopThread("publication")
        stack.callback(thread.close)
        participants = RemoteParticipants(client)
        sink = WeightPublication(config, participants, thread.loop, device=process.device)
        stack.callback(sink.close)
        return RolloutHandles(
            RemoteSource(client),
            sink,
            opened.num_prompts,
            opened.prompt_lengths,
            RemoteMemory(client),
        )

    return open_service


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
        except ActorLost:
            await asyncio.to_thread(self._client.reopen)
            found = await self._client.call_async("participants", method)
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
        except ActorLost:
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

    health = _remote("health")
    pause = _remote("pause")
    resume = _remote("resume")
    begin_update = _remote("begin_update")
    receive_bucket = _remote("receive_bucket")
    receive_serialized = _remote("receive_serialized")
    load_folder = _remote("load_folder")
    end_update = _remote("end_update")
    set_version = _remote("set_version")
    checksum = _remote("checksum")

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        """Let the engine join the process group for weights."""
        await self.call("join_group", address, rank)
        self.in_group = address.name

    def verifier(self) -> WeightVerifier:
        """Implements the protocol. Raises PublicationFailed where the service is gone.

        The next attempt finds another service.
        """
        try:
            found: WeightVerifier = self._client.call("verifier", self.name)
        except ActorLost as error:
            raise PublicationFailed(f"engine {self.name}: {error}") from error
        return found

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Call a method of the engine. Raises EngineFailed where it or the service is gone."""
        try:
            return await self._client.call_async("engine", self.name, verb, *arguments)
        except ActorLost as error:
            raise EngineFailed(f"engine {self.name}: {error}") from error


class RemoteSource:
    """Implements `rlcore.interfaces.RolloutSource`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._limit_s = client.config.rollout.timeout_s + SERVICE_GRACE_S

    def start(self) -> None:
        """Start the service's engines and reward workers."""
        self._client.start()

    def next_step(self, step: int) -> StepRollouts | None:
        """Implements the protocol; None also where the service was replaced."""
        found: tuple[StepRollouts, Mapping[str, Any]] | None = self._work("next_step", step)
        if found is None:
            return None
        rollouts, state = found
        self._client.remember("restore", state)
        return rollouts

    def evaluate(self) -> tuple[dict[str, float], list[Sample]] | None:
        """Implements the protocol; None also where the service was replaced."""
        scored: tuple[dict[str, float], list[Sample]] | None = self._work("source", "evaluate")
        return scored

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Implements the protocol."""
        self._client.tell("published", step, version, incarnation)

    def snapshot(self) -> dict[str, Any]:
        """The state of the newest hand-over, which came with it."""
        return dict(self._client.state or self._client.call("source", "snapshot"))

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Implements the protocol."""
        self._client.tell("restore", state)

    def keep_ledger(self, path: Path) -> None:
        """Implements the protocol."""
        self._client.tell("keep_ledger", path.absolute())

    def close(self) -> None:
        """Do nothing: the service belongs to the driver."""

    def _work(self, part: str, *arguments: Any) -> Any:
        """Make a call that takes as long as generation; None where the service was replaced."""
        try:
            return self._client.call(
                part, *arguments, limit_s=self._limit_s, key="rollout.timeout_s"
            )
        except ActorLost:
            self._client.reopen()
            return None


class RemoteMemory:
    """Implements `rlcore.interfaces.EngineMemory`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._limit_s = all_engines_timeout_s(client.config) + SERVICE_GRACE_S

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Implements the protocol."""
        self._call("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Implements the protocol."""
        self._call("restore", tags)

    def any_running(self) -> bool:
        """Implements the protocol."""
        return bool(self._call("any_running"))

    def _call(self, method: str, *arguments: Any) -> Any:
        limits: dict[str, Any] = {
            "limit_s": self._limit_s,
            "key": "rollout.engine.update_timeout_s",
        }
        return self._client.call("memory", method, *arguments, **limits)
