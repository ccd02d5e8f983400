"""Turns for calls of buckets, which may come before the last one was answered, in any order.

The trainer posts the call of the next bucket while an engine takes the last one. Two calls have two
connections, so the later one may come first. A process group has one order of its broadcasts.

Imports nothing of ours: SGLang's environment, which does not have rlcore, loads it by its path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LIMIT_S = 3600.0  # for the call of an earlier bucket to come and end; the trainer gives up sooner


class OutOfTurn(Exception):
    """The turn of a bucket will not come, and why."""


class Update:
    """The buckets of one update: the turn of `next` has come, and bucket `failed` was not taken."""

    def __init__(self) -> None:
        self.next = 0
        self.failed: int | None = None
        self.is_over = False


class BucketTurns:
    """Has the calls of an update run one after the other, in the order of their buckets.

    Args:
        limit_s: how long a call waits for its turn.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._update = Update()
        self._running = asyncio.Lock()
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Begin an update. Calls of the last one that wait are refused."""
        self._update.is_over = True
        self._update = Update()
        self._wake()

    @asynccontextmanager
    async def take(self, index: int) -> AsyncIterator[Update]:
        """Wait for the turn of bucket `index`, and have it for the body.

        The turns after it are refused if the body raises, or sets `failed` of what it is given. A
        bucket may have a second turn.

        Raises OutOfTurn.
        """
        update = self._update
        try:
            await asyncio.wait_for(self._wait(update, index), self._limit_s)
        except TimeoutError:
            raise OutOfTurn(
                f"bucket {index} waited {self._limit_s:g} s for bucket {update.next}, which did not"
                " come"
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
            raise OutOfTurn(f"bucket {index} is of an update that was given up")
        if update.failed is not None:
            raise OutOfTurn(f"bucket {index} cannot be taken: bucket {update.failed} was not")

    def _wake(self) -> None:
        """Wake all calls that wait, each of which looks whether its turn has come."""
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()
