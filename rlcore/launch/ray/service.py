"""The rollout service as an actor. Rank 0 calls it through proxy.py; a new rank 0 finds it with its
engines running.

It is started again by Ray when it dies, and then knows nothing: every call carries the word that
    `open` gave, so that nobody
takes the new one for the old, and a rank 0 that was given up cannot take a step from the next.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.data.step import StepRollouts
from rlcore.errors import PartLost
from rlcore.interfaces import RolloutEngine
from rlcore.launch.logs import folder_of
from rlcore.launch.ray.actor_env import ActorEnv, log_to
from rlcore.launch.ray.calls import NAMESPACE, ActorLost
from rlcore.launch.ray.engines import cluster_engines
from rollout.engines.sglang.keys import ADMIN_KEY, API_KEY, Keys

if TYPE_CHECKING:
    from rollout.fleet.engine_memory import FleetMemory
    from rollout.service import RolloutService

STDERR = 2  # a descriptor: the service's log
T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    """What rank 0 is told of the service."""

    life: str  # the word for every call
    num_prompts: int
    prompt_lengths: NDArray[np.int64]


@dataclass(frozen=True)
class EngineFacts:
    """What the trainer's rank 0 must know of an engine to send it weights."""

    name: str
    managed: bool
    transports: tuple[str, ...]
    url: str
    group_ranks: int
    in_group: str | None

    @classmethod
    def of(cls, engine: Any) -> EngineFacts:
        return cls(
            engine.name,
            engine.managed,
            engine.transports,
            engine.url,
            engine.group_ranks,
            engine.in_group,
        )


class ServiceActor:
    """One `RolloutService`. An async actor: who waits for rollouts holds up nobody who asks for
    something else.

    Args:
        hosts: the names of the engines' actors, in their order: handles would not outlive the
            process that was given them.
    """

    def __init__(
        self, actor_env: ActorEnv, config: Config, hosts: Sequence[str], keys: Keys
    ) -> None:
        actor_env.enter()
        os.environ |= {API_KEY: keys.api, ADMIN_KEY: keys.admin}
        self._actor_env = actor_env
        self._config = config
        self._hosts = hosts
        self._keys = keys
        self._birth = secrets.token_hex(8)
        self._life = f"{self._birth}/0"  # of the newest rank 0
        self._service: RolloutService | None = None
        self._memory: FleetMemory | None = None
        # a rank 0 may come while one that is gone by now has it build
        self._opening = asyncio.Lock()
        self._starting: asyncio.Future[None] | None = None  # of the engines: once, whoever asks
        # what rank 0 has asked for and not got yet
        self._working: set[asyncio.Future[Any]] = set()

    # --- rank 0 comes -----------------------------------------------------------------------------

    async def open(self, *, greedy_baseline: bool) -> Opened:
        """Read and check what the service needs; one that served another rank 0 waits to be told
        where to go on from.

        Raises UserError as `RolloutService`.
        """
        async with self._opening:
            if self._service is None:
                self._service = await asyncio.to_thread(self._build, greedy_baseline)
            else:
                self._life = f"{self._birth}/{secrets.token_hex(8)}"
                await asyncio.to_thread(self._service.abandon)
                if self._working:
                    await asyncio.wait(self._working)
                await self._in_loop(self._release_engines())
                await asyncio.to_thread(self._service.halt)
            return Opened(self._life, len(self._service.prompts), self._service.prompts.lengths)

    def _build(self, greedy_baseline: bool) -> RolloutService:
        from rlcore.data.tokenizer import load_tokenizer
        from rlcore.launch.compose import build_service
        from rlcore.runs.rng import seed_rng
        from rollout.fleet.engine_memory import FleetMemory

        config = self._config
        seed_rng(config.run.seed)
        tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        hosts = [ray.get_actor(name, namespace=NAMESPACE) for name in self._hosts]
        engines = cluster_engines(config, hosts, self._keys)
        service = build_service(config, tokenizer, engines, greedy_baseline=greedy_baseline)
        self._memory = FleetMemory(service.fleet, config.rollout.engine, service.thread)
        return service

    async def _release_engines(self) -> None:
        """A publication that nobody ends any more is given up."""
        fleet = self.service.fleet
        for engine in fleet.engines:
            fleet.missed(engine)

    async def start(self, life: str) -> None:
        """Engines and reward workers answer when this returns; who comes while they start waits for
        the same start.

        One that is made anew has its engines start as `Fleet.start` says: its run may have gone on
            without some.
        """
        self._check(life)
        if self._starting is None:
            self._actor_env.speak()
            log_to(folder_of(self._config.run) / "service.log")
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
            self._starting = asyncio.ensure_future(
                asyncio.to_thread(self.service.start, again=again)
            )
        await asyncio.shield(self._starting)

    # --- what rank 0 asks -------------------------------------------------------------------------

    async def source(self, life: str, method: str, *arguments: Any) -> Any:
        """A method of `RolloutSource`."""
        self._check(life)
        work = asyncio.ensure_future(asyncio.to_thread(getattr(self.service, method), *arguments))
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        return await work

    async def next_step(self, life: str, step: int) -> tuple[StepRollouts, dict[str, Any]] | None:
        """With the state after the hand-over, from which another service could go on."""
        found = await self.source(life, "next_step", step)
        return None if found is None else (found, await self.source(life, "snapshot"))

    async def memory(self, life: str, method: str, *arguments: Any) -> Any:
        """A method of `EngineMemory`."""
        self._check(life)
        return await asyncio.to_thread(getattr(self._memory, method), *arguments)

    async def members(self, life: str, method: str) -> list[EngineFacts]:
        """`Members.candidates` or `.stale`."""
        self._check(life)
        asked: Callable[[], Coroutine[Any, Any, list[RolloutEngine]]] = getattr(
            self.service.fleet, method
        )
        return [EngineFacts.of(engine) for engine in await self._in_loop(asked())]

    async def told(self, life: str, method: str, name: str, *arguments: Any) -> None:
        """What rank 0 says of an engine: a method of `Members`."""
        self._check(life)

        async def tell() -> None:
            said = getattr(self.service.fleet, method)(self._engine(name), *arguments)
            if asyncio.iscoroutine(said):
                await said

        await self._in_loop(tell())

    async def engine(self, life: str, name: str, verb: str, *arguments: Any) -> Any:
        """A step of a publication, by one engine."""
        self._check(life)
        return await self._in_loop(getattr(self._engine(name), verb)(*arguments))

    async def group_of(self, life: str, name: str) -> str | None:
        """The process group for weights that an engine is in."""
        self._check(life)
        return EngineFacts.of(self._engine(name)).in_group

    async def verifier(self, life: str, name: str) -> Any:
        self._check(life)
        return self._engine(name).verifier()

    async def beat(self) -> None:
        """Answered at once, unless this process hangs; half-way to its end it writes then where
        every thread stands.
        """
        faulthandler.dump_traceback_later(self._config.cluster.heartbeat_timeout_s / 2, file=STDERR)

    async def status(self) -> tuple[int, list[dict[str, Any]]]:
        """The process id, and a row for each engine."""
        members = [] if self._service is None else self._service.fleet.members
        return os.getpid(), [
            {"engine": member.name, "state": str(member.health.state), "version": member.version,
             "restarts": member.health.restarts, "requests": sum(lease.requests for lease in member.leases)}
            for member in members
        ]  # fmt: skip

    async def close(self) -> None:
        if self._service is not None:
            await asyncio.to_thread(self._service.close)

    # --- small things -----------------------------------------------------------------------------

    @property
    def service(self) -> RolloutService:
        assert self._service is not None, "open comes first"
        return self._service

    def _check(self, life: str) -> None:
        """Raises ActorLost for another service's word; PartLost, which nobody recovers from, for
        one of a former rank 0.
        """
        if life == self._life:
            return
        if life.startswith(self._birth):
            raise PartLost("the rollout service has another rank 0 now")
        raise ActorLost("the rollout service died; there is a new one")

    def _engine(self, name: str) -> Any:
        return next(engine for engine in self.service.fleet.engines if engine.name == name)

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what must run on the service's own loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.service.loop))
