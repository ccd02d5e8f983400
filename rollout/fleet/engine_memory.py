"""`rlcore.interfaces.EngineMemory`: engines give the device that they share with the trainer back,
and take it again.

    release     nobody is started any more; requests that are left end; the memory is given back
    restore     it is taken again; once nothing is released, engines generate, and those that died are started again

An engine that fails is ended, and with it goes its memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import MemoryTag
from rlcore.errors import NoEngineLeft
from rlcore.interfaces import RolloutEngine
from rollout.asyncio_utils import LoopThread
from rollout.fleet.fleet import Fleet
from rollout.weight_sync.base import GRACE_S, ask

logger = logging.getLogger(__name__)


class FleetMemory:
    """For the trainer's thread, which blocks; everything happens on the engines' loop.

    Args:
        thread: where the fleet lives.
    """

    def __init__(self, fleet: Fleet, config: EngineConfig, thread: LoopThread) -> None:
        self._fleet = fleet
        self._thread = thread
        self._released: set[MemoryTag] = set()
        self._limit = config.update_timeout_s

    def release(self, tags: Sequence[MemoryTag]) -> None:
        self._call(self._release(tags), "releasing the engines' memory")

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        self._call(self._restore(tags), "restoring the engines' memory")

    def any_running(self) -> bool:
        return bool(self._fleet.running)

    async def _release(self, tags: Sequence[MemoryTag]) -> None:
        await self._fleet.hold()
        # The rollouts are in: what is still in flight nobody waits for any more.
        await self._step("pause", lambda engine: engine.pause("abort"))
        await self._step("release_memory", lambda engine: engine.release_memory(tags))
        self._released |= set(tags)

    async def _restore(self, tags: Sequence[MemoryTag]) -> None:
        await self._step("resume_memory", lambda engine: engine.resume_memory(tags))
        self._released -= set(tags)
        if self._released:
            return
        await self._step("resume", lambda engine: engine.resume(), self._fleet.in_service)
        self._fleet.let_go()
        try:
            await self._fleet.candidates()
        # recovery: whoever needs one next says so, where the trainer can still save
        except NoEngineLeft as error:
            logger.warning("%s", error)

    async def _step(
        self,
        what: str,
        call: Callable[[Any], Awaitable[Any]],
        engines: Sequence[RolloutEngine] | None = None,
    ) -> None:
        answers = await ask(
            self._fleet.running if engines is None else engines, what, call, self._limit
        )
        await asyncio.gather(
            *(self._fleet.failed(engine, why) for engine, why in answers.failed.items())
        )

    def _call(self, work: Coroutine[Any, Any, None], what: str) -> None:
        # Every step keeps its own limit; an engine may have to start, or to come back, meanwhile.
        seconds = self._fleet.comeback_s + 3 * (self._limit + GRACE_S)
        self._thread.call(work, seconds=seconds, what=what)
