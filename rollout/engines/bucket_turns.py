"""Turns for concurrent calls of buckets, which may arrive in any order.

The trainer sends the call for the next bucket while an engine takes the current one. The calls use
separate connections, so the later one may arrive first. A process group has one order of its
broadcasts.

This file imports nothing from rlcore: SGLang's environment, which lacks rlcore, loads it by path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LIMIT_S = 3600.0  # of the wait for an earlier bucket; the trainer gives up sooner


class OutOfTurn(Exception):
    """The turn of a bucket will never come."""


class Update:
    """The state of one update: it is the turn of bucket `next`; bucket `failed` was not taken."""

    def __init__(self) -> None:
        self.next = 0
        self.failed: int | None = None
        self.is_over = False


class BucketTurns:
    """Runs the calls of an update one at a time, in the order of their buckets.

    Args:
        limit_s: how long a call waits for its turn.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._update = Update()
        self._running = asyncio.Lock()
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Begin an update. Waiting calls of the last update are refused."""
        self._update.is_over = True
        self._update = Update()
        self._wake()

    @asynccontextmanager
    async def take(self, index: int) -> AsyncIterator[Update]:
        """Wait for the turn of bucket `index`, and hold it for the body.

        Later turns are refused if the body raises, or sets `failed` of the yielded update. A bucket
        may have a second turn.

        Raises OutOfTurn.
        """
        update = self._update
        try:
            await asyncio.wait_for(self._wait(update, index), self._limit_s)
        except TimeoutError:
            raise OutOfTurn(
                f"bucket {index} waited {self._limit_s:g} s for bucket {update.next}, which did not"
                " arrive"
            ) from None
        async with self._running:
            self._check(update, index)
            try:
                yield update
            except BaseException:
                update.failed = index
                raise
            else:
                update.next = max(update.next, index + 1)
            finally:
                self._wake()

    async def _wait(self, update: Update, index: int) -> None:
        self._check(update, index)
        while index > update.next:
            await self._changed.wait()
            self._check(update, index)

    @staticmethod
    def _check(update: Update, index: int) -> None:
        if update.is_over:
            raise OutOfTurn(f"bucket {index} belongs to a cancelled update")
        if update.failed is not None:
            raise OutOfTurn(f"bucket {index} cannot be taken: bucket {update.failed} was not")

    def _wake(self) -> None:
        """Wake all waiting calls, each of which checks whether it is its turn."""
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()
