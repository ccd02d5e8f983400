"""Holds calls back while an engine is paused, and counts the calls in flight."""

from __future__ import annotations

import asyncio


class PauseGate:
    """Use `async with gate` around a call, from one event loop. Callers limit the wait."""

    def __init__(self) -> None:
        self.inside = 0
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._open.set()
        self._empty.set()

    async def __aenter__(self) -> None:
        """Wait until the gate is open; from then on the call counts as in flight."""
        # The gate may be closed again before a waiting call wakes.
        while not self._open.is_set():
            await self._open.wait()
        self.inside += 1
        self._empty.clear()

    async def __aexit__(self, *_: object) -> None:
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    def close(self) -> None:
        """Make new calls wait."""
        self._open.clear()

    def open(self) -> None:
        """Let calls through."""
        self._open.set()

    async def emptied(self) -> None:
        """Wait until no call is in flight."""
        await self._empty.wait()
