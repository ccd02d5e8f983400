"""Holds calls back while an engine is paused, and counts the calls in flight."""

from __future__ import annotations

import asyncio

from rlcore.errors import EngineHangs


class PauseGate:
    """`async with` it around a call. Use it from one event loop."""

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.inside = 0
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._open.set()
        self._empty.set()

    async def __aenter__(self) -> None:
        """Wait until the gate is open; from then on the call counts as in flight.

        Raises EngineHangs when the gate was not opened for `timeout_s`.
        """
        deadline = 0.0
        # a call wakes a moment after the gate was opened, when it may be closed again
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
        """From now on calls wait."""
        self._open.clear()

    def open(self) -> None:
        """Let calls through."""
        self._open.set()

    async def emptied(self) -> None:
        """Wait until no call is in flight. Raises EngineHangs after `timeout_s`."""
        if not await self.empties_within(self.timeout_s):
            raise self._hangs(f"still had {self.inside} requests in flight")

    async def empties_within(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether no call is in flight."""
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
