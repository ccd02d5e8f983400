"""Engines that take part in publications and are never started again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlcore.errors import RunFailed
from rlcore.interfaces import RolloutEngine
from rollout.weight_sync.base import ask

KILL_S = 30.0
logger = logging.getLogger(__name__)


class StaticParticipants:
    """A `Fleet` of a fixed set, for a publication: a failed engine is ended and forgotten."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = list(engines)  # that are left
        self.dropped: dict[str, str] = {}  # name of an engine -> why

    async def candidates(self) -> Sequence[RolloutEngine]:
        return self.engines

    async def stale(self) -> Sequence[RolloutEngine]:
        return []

    def draining(self, engine: RolloutEngine) -> None: ...

    def published(self, engine: RolloutEngine, version: int) -> None: ...

    def missed(self, engine: RolloutEngine) -> None: ...

    async def out(self, engine: RolloutEngine, why: str) -> None:
        self.engines.remove(engine)
        self.dropped[engine.name] = why
        answers = await ask([engine], "kill", lambda e: e.kill(), KILL_S)
        for trouble in answers.failed.values():
            logger.warning("engine %s did not end: %s", engine.name, trouble)
        if not self.engines:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.dropped.items())
            raise RunFailed(f"no engine is left to take the new weights: {reasons}")
