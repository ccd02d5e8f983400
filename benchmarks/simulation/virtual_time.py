"""An event loop whose time is simulated, and resources that coroutines on it share."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
EPSILON = 1e-9  # seconds; the clock of asyncio has no finer one


class _NoWait(selectors.PollSelector):  # `select` takes no descriptor above 1023
    """Passes the time instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("the simulation stands still: every coroutine waits for another")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in simulated seconds, from 0 on. Work in threads is not possible."""

    def __init__(self) -> None:
        self._clock = _NoWait()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the simulated time in seconds."""
        return self._clock.now


def simulated(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in simulated time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class Turns:
    """One thread, which does one piece of work after the other."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def work(self, seconds: float) -> None:
        """Return when this piece is done."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + seconds
        await asyncio.sleep(self._free_at - now)


class Link:
    """A direction of a network card, whose rate the transfers at hand share equally.

    Args:
        rate: bytes/s.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left: dict[asyncio.Future[None], float] = {}  # bytes
        self._at = 0.0  # when `_left` was true
        self._next: asyncio.TimerHandle | None = None

    async def carry(self, num_bytes: float) -> None:
        """Return when so many bytes have passed."""
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left[done] = num_bytes
        self._plan()
        await done

    def _advance(self) -> None:
        """Bring `_left` to the present, and end the transfers that are through."""
        now = asyncio.get_running_loop().time()
        if self._left:
            passed = (now - self._at) * self._rate / len(self._left)
            self._left = {one: left - passed for one, left in self._left.items()}
        self._at = now
        for one in [one for one, left in self._left.items() if left <= self._rate * EPSILON]:
            del self._left[one]
            one.set_result(None)

    def _plan(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._left:
            seconds = min(self._left.values()) * len(self._left) / self._rate
            self._next = asyncio.get_running_loop().call_later(seconds, self._step)

    def _step(self) -> None:
        self._next = None
        self._advance()
        self._plan()
