"""Releases and restores the engines' memory on a shared device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import MemoryTag
from rlcore.deadlines import TRANSPORT_GRACE_S
from rlcore.errors import NoEngineLeft
from rollout.asyncio_utils import LoopThread
from rollout.fleet.engine_states import State
from rollout.fleet.fleet import RUNNING, Fleet
from rollout.weight_sync.base import ask

logger = logging.getLogger(__name__)


class FleetMemory:
    """Implements `rlcore.interfaces.EngineMemory`, from the fleet's `thread`."""

    def __init__(self, fleet: Fleet, config: EngineConfig, thread: LoopThread) -> None:
        self._fleet = fleet
        self._thread = thread
        self._released: set[MemoryTag] = set()
        self._limit = config.update_timeout_s

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """See `EngineMemory.release`."""
        self._call(self._release(tags), "releasing the engines' memory")

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """See `EngineMemory.restore`."""
        self._call(self._restore(tags), "restoring the engines' memory")

    def any_running(self) -> bool:
        """See `EngineMemory.any_running`."""
        return bool(self._fleet.in_state(*RUNNING))

    async def _release(self, tags: Sequence[MemoryTag]) -> None:
        await self._fleet.pause_starts()
        # All rollouts have ended: nothing waits for a request that is still in flight.
        await self._step("pause", lambda engine: engine.pause("abort"), *RUNNING)
        await self._step("release_memory", lambda engine: engine.release_memory(tags), *RUNNING)
        self._released |= set(tags)

    async def _restore(self, tags: Sequence[MemoryTag]) -> None:
        await self._step("resume_memory", lambda engine: engine.resume_memory(tags), *RUNNING)
        self._released -= set(tags)
        if self._released:
            return
        await self._step("resume", lambda engine: engine.resume(), State.SERVING)
        self._fleet.resume_starts()
        try:
            await self._fleet.candidates()
        # recovery: the next call that needs an engine raises, and the trainer can save by then
        except NoEngineLeft as error:
            logger.warning("%s", error)

    async def _step(self, what: str, call: Callable[[Any], Awaitable[Any]], *states: State) -> None:
        answers = await ask(self._fleet.in_state(*states), what, call, self._limit)
        await asyncio.gather(
            *(self._fleet.failed(engine, why) for engine, why in answers.failed.items())
        )

    def _call(self, work: Coroutine[Any, Any, None], what: str) -> None:
        # Every step has its own limit; an engine may also have to restart during the call.
        seconds = self._fleet.restart_timeout_s + 3 * (self._limit + TRANSPORT_GRACE_S)
        self._thread.call(work, seconds=seconds, what=what)
