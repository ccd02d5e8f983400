"""Waits with a limit, and runs an asyncio loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from rlcore.deadlines import CANCEL_S, LOOP_GRACE_S
from rlcore.errors import DeadlineExceeded

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def within(seconds: float, work: Awaitable[T], describe: Callable[[], str]) -> T:
    """The result of `work`, which is cancelled after `seconds`.

    Raises:
        DeadlineExceeded: with the message `describe()`, evaluated before anything is cancelled.
    """
    # Not asyncio.wait_for: a deadline inside `work` would look like this one, and a task that
    # resists cancellation would be waited for without limit.
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_S)
        raise
    if done:
        return task.result()
    message = describe()
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_S)
    if task.done() and not task.cancelled():
        # retrieve the error, so that asyncio does not log it: the deadline is its cause
        task.exception()
    raise DeadlineExceeded(message)


def asked_to_end(task: asyncio.Task[Any] | None) -> bool:
    """Whether a CancelledError in the running `task` comes from `task.cancel()`.

    True where Python cannot tell.
    """
    return task is None or sys.version_info < (3, 11) or task.cancelling() > 0


async def gather_or_cancel(*work: Awaitable[T]) -> list[T]:
    """All results, or the first error, after which nothing of `work` goes on."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        if left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=CANCEL_S)


def call_on(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], seconds: float, late: str
) -> T:
    """The result of `work`, which another thread's `loop` runs.

    Raises:
        DeadlineExceeded: with the message `late`.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(seconds)
    except FutureTimeout as error:
        if future.done():  # the work's own TimeoutError
            raise
        raise DeadlineExceeded(late) from error
    finally:
        # no effect when done; else (an interrupt, say) the work ends too
        future.cancel()


class LoopThread:
    """Runs an asyncio loop in a daemon thread, for synchronous code."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T], *, seconds: float, what: str) -> T:
        """Run `work` in the loop and wait for its result.

        `work` keeps its own deadline; `seconds` is the last resort.

        Raises:
            DeadlineExceeded: the loop did not answer, because something blocks its thread.
        """
        limit = seconds + LOOP_GRACE_S
        late = (
            f"{what}: no answer after {limit:.0f} s; an engine, workflow or filter blocks the"
            " rollout thread"
        )
        return call_on(self.loop, work, limit, late)

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        if self.loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result(
                CANCEL_S + LOOP_GRACE_S
            )
        except FutureTimeout:
            logger.warning("the thread %s is blocked and is left behind", self._thread.name)
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CANCEL_S)
        if not self._thread.is_alive():
            self.loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_S)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
