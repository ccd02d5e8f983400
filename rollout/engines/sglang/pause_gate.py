"""Lets calls through while it is open, and knows how many are inside. For one event loop."""

from __future__ import annotations

import asyncio

from rlcore.errors import EngineHangs


class PauseGate:
    def __init__(self, name: str, *, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.inside = 0
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._open.set()
        self._empty.set()

    async def __aenter__(self) -> None:
        """Inside the block a call counts as in flight. Raises EngineHangs when it was not opened
        for `timeout_s`.
        """
        deadline = 0.0
        # who waited is woken a moment later, when it may be closed again
        while not self._open.is_set():
            now = asyncio.get_running_loop().time()
            deadline = deadline or now + self.timeout_s
            if not await _happens(self._open, deadline - now):
                raise self._hangs("was paused and not resumed")
        self.inside += 1
        self._empty.clear()

    async def __aexit__(self, *_: object) -> None:
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def emptied(self) -> None:
        """Returns once nobody is inside. Raises EngineHangs after the limit."""
        if not await self.empties_within(self.timeout_s):
            raise self._hangs(f"still had {self.inside} requests in flight")

    async def empties_within(self, seconds: float) -> bool:
        return await _happens(self._empty, seconds)

    def _hangs(self, what: str) -> EngineHangs:
        return EngineHangs(
            f"engine {self.name} {what} after {self.timeout_s:g} s"
            " (rollout.engine.request_timeout_s)"
        )


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    waiting = asyncio.ensure_future(event.wait())
    try:
        done, _ = await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()
    return bool(done)
