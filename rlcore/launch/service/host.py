"""Hosts the rollout service in a process of its own, and answers the calls of rank 0's client.

Every call carries the token that `open` returned: a call that was meant for the service before
fails, and a rank 0 that was given up cannot take a step from its successor.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config
from rlcore.config.secrets import hide_secrets
from rlcore.data.batch import StepRollouts
from rlcore.errors import EngineFailed, PartLost, RunFailed
from rlcore.interfaces import RolloutEngine
from rlcore.launch.run_folder import record_timeline
from rlcore.launch.service.channel import ServiceLost
from rlcore.timeline.recorder import RECORDER
from rollout.weight_sync.base import gpus_of

if TYPE_CHECKING:
    from rollout.fleet.engine_memory import FleetMemory
    from rollout.service import RolloutService

T = TypeVar("T")
STDERR = 2  # by its number, which is the service's log: `sys.stderr` may lead to rank 0


@dataclass(frozen=True)
class OpenedService:
    """What rank 0 learns when it opens the service."""

    token: str  # the first argument of every call
    num_prompts: int
    prompt_lengths: NDArray[np.int64]


@dataclass(frozen=True)
class EngineInfo:
    """What rank 0 must know of an engine to send it weights."""

    name: str
    managed: bool
    transports: tuple[str, ...]
    # of an engine that process groups reach
    url: str = ""
    group_ranks: int = 1
    in_group: str | None = None
    gpus: tuple[str, ...] = ()  # of an engine that tells them
    digests_buckets: bool = False  # of an engine that tells what it received
    queues_buckets: bool = False  # of an engine that takes calls of several buckets at once

    @classmethod
    def of(cls, engine: Any) -> EngineInfo:
        """Read it from an engine of the service."""
        known = [field.name for field in fields(cls) if hasattr(engine, field.name)]
        return cls(**{**{name: getattr(engine, name) for name in known}, "gpus": gpus_of(engine)})


class ServiceHost(ABC):
    """Has one `RolloutService`. A call that waits for rollouts blocks no other."""

    def __init__(self, config: Config) -> None:
        hide_secrets(config.model_dump())
        self._config = config
        self._instance = secrets.token_hex(8)
        self._token = f"{self._instance}/0"  # of the newest rank 0
        self._service: RolloutService | None = None
        self._memory: FleetMemory | None = None
        # A rank 0 may call `open` while the service is built for its lost predecessor.
        self._opening = asyncio.Lock()
        self._starting: asyncio.Future[None] | None = None  # of the engines, which start once
        self._pending: set[asyncio.Future[Any]] = set()  # rank 0's unfinished calls

    @abstractmethod
    def _engines(self) -> Sequence[RolloutEngine]:
        """Build the engines, without starting them. Raises ConfigError."""

    @abstractmethod
    def _open_log(self) -> bool:
        """Write to the run's folder from now on; return whether this replaces a lost service."""

    async def beat(self) -> None:
        """Answer at once; a process that hangs cannot, and writes its stacks at half the limit."""
        limit_s = self._config.cluster.heartbeat_timeout_s
        faulthandler.dump_traceback_later(limit_s / 2, file=STDERR)

    # --- opening and starting ---------------------------------------------------------------------

    async def open(self, *, greedy_baseline: bool) -> OpenedService:
        """Read and check the service's input; one that served another rank 0 waits for `restore`.

        Raises UserError as `RolloutService`.
        """
        async with self._opening:
            if self._service is None:
                self._service = await asyncio.to_thread(self._build, greedy_baseline)
            else:
                self._token = f"{self._instance}/{secrets.token_hex(8)}"
                await asyncio.to_thread(self._service.abandon)
                if self._pending:
                    await asyncio.wait(self._pending)
                await self._in_loop(self._abandon_publication())
                await asyncio.to_thread(self._service.halt)
            prompts = self._service.prompts
            return OpenedService(self._token, len(prompts), prompts.lengths)

    def _build(self, greedy_baseline: bool) -> RolloutService:
        from rlcore.data.loading import load_prompts
        from rlcore.data.tokenizer import load_tokenizer
        from rlcore.runs.state import seed_rng
        from rollout.fleet.engine_memory import FleetMemory
        from rollout.service import RolloutService

        config = self._config
        seed_rng(config.run.seed)
        tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        engines = self._engines()
        prompts = load_prompts(config, tokenizer)
        service = RolloutService(
            config, tokenizer, engines, prompts, greedy_baseline=greedy_baseline
        )
        self._memory = FleetMemory(service.fleet, config.rollout.engine, service.thread)
        return service

    async def _abandon_publication(self) -> None:
        """Give up a publication that the former rank 0 has left open."""
        fleet = self.service.fleet
        for engine in fleet.engines:
            fleet.missed(engine)

    async def start(self, token: str) -> None:
        """Start engines and reward workers, once: a call during the start waits for it.

        In the place of a lost service, the run may have gone on without some engines: see
        `Fleet.start`.
        """
        self._check(token)
        if self._starting is None:
            again = self._open_log()
            record_timeline(self._config, "service")
            self._starting = asyncio.ensure_future(
                asyncio.to_thread(self.service.start, again=again)
            )
        await asyncio.shield(self._starting)

    # --- calls of rank 0 --------------------------------------------------------------------------

    async def source(self, token: str, method: str, *arguments: Any) -> Any:
        """Call a method of `RolloutSource`."""
        self._check(token)
        work = asyncio.ensure_future(
            asyncio.to_thread(self._method(self.service, method), *arguments)
        )
        self._pending.add(work)
        work.add_done_callback(self._pending.discard)
        found = await work
        if method == "restore":
            RECORDER.begin(self.service.ledger.last_step)
        return found

    async def next_step(self, token: str, step: int) -> tuple[StepRollouts, dict[str, Any]] | None:
        """Return a step's rollouts, and the state from which another service could continue."""
        found = await self.source(token, "next_step", step)
        if found is not None:
            RECORDER.flush(step)
        return None if found is None else (found, await self.source(token, "snapshot"))

    async def memory(self, token: str, method: str, *arguments: Any) -> Any:
        """Call a method of `EngineMemory`."""
        self._check(token)
        return await asyncio.to_thread(self._method(self._memory, method), *arguments)

    async def participants(self, token: str, method: str) -> list[EngineInfo]:
        """Call `Participants.candidates` or `.stale`."""
        self._check(token)
        asked: Callable[[], Coroutine[Any, Any, list[RolloutEngine]]] = self._method(
            self.service.fleet, method
        )
        return [EngineInfo.of(engine) for engine in await self._in_loop(asked())]

    async def notify(self, token: str, method: str, name: str, *arguments: Any) -> None:
        """Call another method of `Participants`, which is about one engine."""
        self._check(token)

        async def call() -> None:
            try:
                engine = self._engine(name)
            except EngineFailed:  # it has left meanwhile, and needs no such news
                return
            result = self._method(self.service.fleet, method)(engine, *arguments)
            if asyncio.iscoroutine(result):
                await result

        await self._in_loop(call())

    async def engine(self, token: str, name: str, verb: str, *arguments: Any) -> Any:
        """Call a method of an engine, for a publication."""
        self._check(token)
        return await self._in_loop(self._method(self._engine(name), verb)(*arguments))

    async def verifier(self, token: str, name: str) -> Any:
        """Call `RolloutEngine.verifier`."""
        self._check(token)
        return self._engine(name).verifier()

    async def status(self) -> tuple[int, list[dict[str, Any]]]:
        """The process id, and a row for each engine."""
        members = [] if self._service is None else self._service.fleet.members
        return os.getpid(), [member.describe() for member in members]

    async def close(self) -> None:
        """End the service and its engines."""
        if self._service is not None:
            await asyncio.to_thread(self._service.close)

    # --- helpers ----------------------------------------------------------------------------------

    @property
    def service(self) -> RolloutService:
        """The service, once it is open."""
        assert self._service is not None, "open comes first"
        return self._service

    def _check(self, token: str) -> None:
        """Raise ServiceLost for a token of another instance.

        For the token of a former rank 0 raise PartLost, from which that rank does not recover.
        """
        if token == self._token:
            return
        if str(token).startswith(self._instance):
            raise PartLost("the rollout service has another rank 0 now")
        raise ServiceLost("the rollout service died; there is a new one")

    def _engine(self, name: str) -> Any:
        for engine in self.service.fleet.engines:
            if engine.name == name:
                return engine
        raise EngineFailed(f"the run has no engine {str(name)[:80]!r} any more")

    @staticmethod
    def _method(of: Any, name: str) -> Callable[..., Any]:
        """Return a public method. Raises RunFailed where there is none: rank 0 is of other code."""
        known = isinstance(name, str) and not name.startswith("_")
        method = getattr(of, name, None) if known else None
        if not callable(method):
            raise RunFailed(f"the rollout service knows no call {str(name)[:80]!r}")
        return method  # type: ignore[no-any-return]

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the service's own loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.service.loop))
