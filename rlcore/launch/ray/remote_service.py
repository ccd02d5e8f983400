"""The engines in a publication, as rank 0 sees them: who takes part, and the verbs that a sink and
its transports use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlcore.config import Config
from rlcore.data.generation import MemoryTag, PauseMode
from rlcore.data.sample import Sample
from rlcore.data.step import StepRollouts
from rlcore.errors import EngineFailed, PublicationFailed
from rlcore.interfaces import RolloutEngine, WeightVerifier
from rlcore.launch.compose import OpenService, RolloutHandles, patience_with_engines
from rlcore.launch.process import Process
from rlcore.launch.ray.calls import ActorLost
from rlcore.launch.ray.service import EngineFacts
from rlcore.launch.ray.service_client import GRACE_S, ServiceClient
from rlcore.weights import Bucket
from rollout.asyncio_utils import LoopThread
from rollout.weight_sync.process_group import GroupAddress
from rollout.weight_sync.publication import WeightPublication

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        # recovery: the next attempt finds the engine as the new service does
        except ActorLost:
            return


class RemoteEngineHandle:
    """An engine in a publication: the verbs that a sink and its transports use."""

    def __init__(self, line: ServiceClient, facts: EngineFacts) -> None:
        self._line = line
        self.facts = facts

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

    def verifier(self) -> WeightVerifier:
        """Raises PublicationFailed where the service is gone: the next attempt finds another one."""
        try:
            found: WeightVerifier = self._line.ask("verifier", self.name)
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


def opener(actor: Any) -> OpenService:
    """Opens the service that is `actor` (a Ray handle), for rank 0."""

    def open_service(
        config: Config,
        process: Process,
        tokenizer: PreTrainedTokenizerBase,
        stack: ExitStack,
        *,
        greedy_baseline: bool,
    ) -> RolloutHandles:
        line = ServiceClient(actor, config, greedy_baseline=greedy_baseline)
        opened = line.open()
        thread = LoopThread("publication")
        stack.callback(thread.close)
        sink = WeightPublication(
            config, RemoteParticipants(line), thread.loop, device=process.device
        )
        stack.callback(sink.close)
        return RolloutHandles(
            RemoteSource(line), sink, opened.num_prompts, opened.prompt_lengths, RemoteMemory(line)
        )

    return open_service


class RemoteSource:
    """`rlcore.interfaces.RolloutSource`."""

    def __init__(self, line: ServiceClient) -> None:
        self._line = line
        rollout = line.config.rollout
        self._limit_s = rollout.timeout_s + GRACE_S

    def start(self) -> None:
        self._line.start()

    def next_step(self, step: int) -> StepRollouts | None:
        """None, too, where the service had to be made anew."""
        found: tuple[StepRollouts, Mapping[str, Any]] | None = self._work("next_step", step)
        if found is None:
            return None
        rollouts, self._line.state = found
        return rollouts

    def evaluate(self) -> tuple[dict[str, float], list[Sample]] | None:
        scored: tuple[dict[str, float], list[Sample]] | None = self._work("source", "evaluate")
        return scored

    def published(self, step: int, version: int, incarnation: int) -> None:
        self._line.published = (step, version, incarnation)
        self._recovered(lambda: self._line.ask("source", "published", step, version, incarnation))

    def snapshot(self) -> dict[str, Any]:
        """That of the newest hand-over, which is here already."""
        return dict(self._line.state or self._line.ask("source", "snapshot"))

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self._line.state = state
        self._recovered(self._line.restore)

    def keep_ledger(self, path: Path) -> None:
        self._line.ledger = path.absolute()
        self._recovered(self._line.keep_ledger)

    def close(self) -> None:
        """The service belongs to the driver."""

    def _work(self, part: str, *arguments: Any) -> Any:
        """What takes as long as generation does; None where the service is another one now."""
        try:
            return self._line.ask(part, *arguments, limit_s=self._limit_s, key="rollout.timeout_s")
        except ActorLost:
            self._line.revive()
            return None

    def _recovered(self, say: Callable[[], Any]) -> None:
        try:
            say()
        except ActorLost:
            self._line.revive()  # which says it


class RemoteMemory:
    """`rlcore.interfaces.EngineMemory`."""

    def __init__(self, line: ServiceClient) -> None:
        self._line = line
        self._limit_s = patience_with_engines(line.config) + GRACE_S

    def release(self, tags: Sequence[MemoryTag]) -> None:
        self._ask("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        self._ask("restore", tags)

    def anyone(self) -> bool:
        return bool(self._ask("anyone"))

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._line.ask(
            "memory",
            method,
            *arguments,
            limit_s=self._limit_s,
            key="rollout.engine.update_timeout_s",
        )
