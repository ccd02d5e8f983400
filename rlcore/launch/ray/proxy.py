"""What rank 0 holds instead of a rollout service of its own: the seams of `rlcore.protocols`, over calls of the service actor.

Weights do not go this way: rank 0 sends them itself, in its process group with each engine. Where the service died, the one
that Ray starts in its place is given the newest state that rank 0 has seen, and asks for the weights: what was drawn since
is drawn again.
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
from rlcore.data.sample import Sample
from rlcore.errors import EngineFailed
from rlcore.launch.compose import Office, OpenService, patience_with_engines
from rlcore.launch.process import Process
from rlcore.launch.ray.calls import ActorLost, answer, get, get_when_up
from rlcore.launch.ray.service import EngineFacts, Opened
from rlcore.protocols import MemoryTag, PauseMode, RolloutEngine, StepRollouts, WeightExpectation
from rlcore.weights import Bucket
from rollout.deadlines import LoopThread
from rollout.engines.weight_group import GroupAddress
from rollout.rewards.pool import START_TIMEOUT_S as REWARD_START_TIMEOUT_S
from rollout.wire import EngineSink

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GRACE_S = 60.0          # the service keeps its own limits; ours comes a little later
WORD_S = 60.0           # for the service to answer what needs no work
SERVICE = "the rollout service"


def opener(actor: Any) -> OpenService:
    """Opens the service that is `actor` (a Ray handle), for rank 0."""

    def open_service(
        config: Config, process: Process, tokenizer: PreTrainedTokenizerBase, stack: ExitStack, *, greedy_baseline: bool
    ) -> Office:
        line = ServiceLine(actor, config, greedy_baseline=greedy_baseline)
        opened = line.open()
        thread = LoopThread("publication")
        stack.callback(thread.close)
        sink = EngineSink(config, RemoteMembers(line), thread.loop, device=process.device)
        stack.callback(sink.close)
        return Office(RemoteSource(line), sink, opened.num_prompts, opened.prompt_lengths, RemoteMemory(line))

    return open_service


class ServiceLine:
    """Rank 0's line to the service. Its main thread and its publication thread use it, never both at once."""

    def __init__(self, actor: Any, config: Config, *, greedy_baseline: bool) -> None:
        self.actor, self.config, self._greedy_baseline = actor, config, greedy_baseline
        self._life = ""
        self._started = False
        self._said: list[Any] = []              # calls whose answer is awaited with the next one's
        # What a new service is told, in this order: where it was, and which weights are in force.
        self.state: Mapping[str, Any] | None = None
        self.ledger: Path | None = None
        self.published: tuple[int, int, int] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    def open(self) -> Opened:
        """Raises UserError for bad prompts and the like."""
        limit = self.config.cluster.start_timeout_s

        def ask() -> Any:
            return self.actor.open.remote(greedy_baseline=self._greedy_baseline)

        opened: Opened = get_when_up(ask, limit_s=limit, what=f"opening {SERVICE}", key="cluster.start_timeout_s")
        self._life, self._said = opened.life, []
        return opened

    def start(self) -> None:
        limit = self.config.rollout.engine.start_timeout_s + REWARD_START_TIMEOUT_S + GRACE_S
        asked = self.actor.start.remote(self._life)
        get(asked, limit_s=limit, what=f"starting {SERVICE}", key="rollout.engine.start_timeout_s")
        self._started = True

    def revive(self) -> None:
        """After ActorLost: the new service, in the state of the last hand-over; its engines wait for weights.

        Raises ActorLost where engines share the trainer's GPUs: nobody knows what they keep there.
        """
        if self.config.rollout.engine.colocated:
            raise ActorLost(f"{SERVICE} died, and with it the knowledge of what its engines keep on the trainer's GPUs")
        self.open()
        if self._started:
            self.start()
        if self.state is not None:
            self.ask("source", "restore", self.state)
        if self.ledger is not None:
            self.ask("source", "keep_ledger", self.ledger)
        if self.published is not None:
            self.ask("source", "published", *self.published)

    # --- calls ----------------------------------------------------------------------------------------------------

    def ask(self, part: str, *arguments: Any, limit_s: float = WORD_S, key: str = "a fixed limit") -> Any:
        """The answer, for the main thread. Raises ActorLost, DeadlineExceeded, or what the service raised."""
        for said in self._taken():
            get(said, limit_s=WORD_S, what=SERVICE, key="a fixed limit")
        return get(self._call(part, arguments), limit_s=limit_s, what=f"{SERVICE}: {part}", key=key)

    async def answer(self, part: str, *arguments: Any) -> Any:
        """As `ask`, for the publication's loop, which has limits of its own."""
        for said in self._taken():
            await answer(said, what=SERVICE)
        return await answer(self._call(part, arguments), what=SERVICE)

    def say(self, *arguments: Any) -> None:
        """Heard before the next question is answered."""
        self._said.append(self._call("told", arguments))

    def _call(self, part: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self.actor, part).remote(self._life, *arguments)

    def _taken(self) -> list[Any]:
        said, self._said = self._said, []
        return said


class RemoteSource:
    """`rlcore.protocols.RolloutSource`."""

    def __init__(self, line: ServiceLine) -> None:
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

    def restore(self, state: Mapping[str, Any]) -> None:
        self._line.state = state
        self._recovered(lambda: self._line.ask("source", "restore", state))

    def keep_ledger(self, path: Path) -> None:
        self._line.ledger = path.absolute()
        self._recovered(lambda: self._line.ask("source", "keep_ledger", path.absolute()))

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
            self._line.revive()     # which says it


class RemoteMembers:
    """`rollout.wire.Members`."""

    def __init__(self, line: ServiceLine) -> None:
        self._line = line
        self._engines: dict[str, RemoteMember] = {}

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

    def _known(self, facts: EngineFacts) -> RemoteMember:
        """One object an engine: transports remember their connections by it."""
        member = self._engines.setdefault(facts.name, RemoteMember(self._line, facts))
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


class RemoteMember:
    """An engine in a publication: the verbs that a sink and its transports use."""

    def __init__(self, line: ServiceLine, facts: EngineFacts) -> None:
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
        found: WeightExpectation = self._line.ask("expectation", self.name)
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


class RemoteMemory:
    """`rlcore.protocols.EngineMemory`."""

    def __init__(self, line: ServiceLine) -> None:
        self._line = line
        self._limit_s = patience_with_engines(line.config) + GRACE_S

    def release(self, tags: Sequence[MemoryTag]) -> None:
        self._ask("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        self._ask("restore", tags)

    def anyone(self) -> bool:
        return bool(self._ask("anyone"))

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._line.ask("memory", method, *arguments, limit_s=self._limit_s, key="rollout.engine.update_timeout_s")
