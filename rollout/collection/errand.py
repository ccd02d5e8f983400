"""Work of the rollout thread that the trainer waits for, and leaves alone for a while when an
engine waits for its weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from rollout.asyncio_utils import LoopThread, within

T = TypeVar("T")

DROP_S = 30.0


class Errand(Generic[T]):
    """Begins at once, and goes on whether somebody waits or not, for `limit_s` at most.

    Args:
        what: for messages, as "the rollouts of step 3".
        stuck: the message of its deadline.
    """

    def __init__(
        self,
        thread: LoopThread,
        work: Coroutine[Any, Any, T],
        *,
        limit_s: float,
        what: str,
        stuck: Callable[[], str],
    ) -> None:
        self._thread = thread
        self._limit_s = limit_s
        self._what = what
        self._began = time.perf_counter()
        self._task = thread.call(_begun(within(limit_s, work, stuck)), seconds=limit_s, what=what)

    def done_before(self, other: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Wait until it is done: True, or until `other()` is: False. Raises what the work raised;
        it is over then.
        """
        try:
            done = self._thread.call(
                _first(self._task, other), seconds=self._limit_s, what=self._what
            )
            if done:
                self._task.result()
        except BaseException:
            self.drop()
            raise
        return done

    def result(self) -> T:
        """Of work that is done."""
        return self._task.result()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    def drop(self) -> None:
        """End the work, if it goes on; who waits for it gets CancelledError."""
        if not self._task.done():
            self._thread.call(
                _cancelled(self._task), seconds=DROP_S, what=f"giving up {self._what}"
            )


async def _begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.ensure_future(work)


async def _first(task: asyncio.Task[Any], other: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Whether `task` is done, when one of the two is."""
    waiting = asyncio.ensure_future(other())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return task.done()


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=DROP_S)
