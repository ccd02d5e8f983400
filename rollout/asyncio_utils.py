"""Deadlines, processes and threads that may hang, and an event loop in its own thread."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from rlcore.boundary.process_tree import kill_tree
from rlcore.deadlines import CANCEL_S, IDLE_THREAD_S, LOOP_GRACE_S, REAP_S, STRAYS_S
from rlcore.errors import DeadlineExceeded, RunFailed

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_CALLS = 256  # concurrent calls of users' synchronous functions
MAX_HANGING = 1024  # such calls that were given up and have not returned
MAX_OWN = 32  # threads of an event loop's own executor


# --- waits ----------------------------------------------------------------------------------------


async def cancel(*tasks: asyncio.Future[Any], seconds: float | None = None) -> None:
    """Cancel tasks, and wait briefly for their ends."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_S if seconds is None else seconds)


async def within(seconds: float, work: Awaitable[T], describe: Callable[[], str]) -> T:
    """The result of `work`, which is cancelled after `seconds`.

    Raises:
        DeadlineExceeded: with the message `describe()`, evaluated before the cancellation.
    """
    # Not asyncio.wait_for: a deadline inside `work` raises the same error, and it waits
    # without limit for a task that resists cancellation.
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await cancel(task)
        raise
    if done:
        return task.result()
    message = describe()
    await cancel(task)
    if task.done() and not task.cancelled():
        # retrieve the error, so that asyncio does not log it: it follows from the deadline
        task.exception()
    raise DeadlineExceeded(message)


async def gather_or_cancel(*work: Awaitable[T]) -> list[T]:
    """All results, or the first error, after which the rest of `work` is cancelled."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel(*(task for task in tasks if not task.done()))


# --- processes ------------------------------------------------------------------------------------


async def has_ended(process: asyncio.subprocess.Process, seconds: float) -> bool:
    """Wait for the end of a process; return whether it ended."""
    waiting = asyncio.ensure_future(process.wait())
    done, _ = await asyncio.wait({waiting}, timeout=seconds)
    waiting.cancel()
    return bool(done)


async def kill_process(process: asyncio.subprocess.Process, what: str) -> None:
    """Kill a process, called `what` in the log, and all its descendants."""
    if process.returncode is None:
        # in a thread, since it polls until no process is left
        await asyncio.to_thread(kill_tree, process.pid, seconds=STRAYS_S)
    # a process that hangs in the kernel, for example on a dead file server, is left behind
    if not await has_ended(process, REAP_S):
        logger.warning("the %s %d cannot be ended", what, process.pid)


# --- threads --------------------------------------------------------------------------------------


class _Call(Future[Any]):
    """A call of a function, in a thread of a `DaemonExecutor`."""

    def __init__(self, executor: DaemonExecutor, function: Callable[[], Any]) -> None:
        super().__init__()
        self._executor = executor
        self._function = function

    def cancel(self) -> bool:
        """Give the call up; a running call continues unobserved, and frees its slot."""
        if super().cancel():
            return True
        self._executor.give_up(self)
        return False

    def run(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the call
            self.set_exception(error)
        else:
            self.set_result(result)


class DaemonExecutor(ThreadPoolExecutor):
    """Runs calls in daemon threads, which do not keep the process from ending.

    A running call that is cancelled no longer counts towards `most`.

    Args:
        most: limit of concurrent calls; further calls wait.
    """

    def __init__(self, most: int, name: str) -> None:
        # asyncio requires this class; its own threads are never started
        super().__init__(1, name)
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        # running calls, without those given up
        self._running: set[_Call] = set()
        # threads whose call was not given up
        self._serving = 0
        # serving threads without a call
        self._idle = 0
        self._closed = False
        # calls that were given up and still run
        self.given_up = 0

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        call = _Call(self, functools.partial(function, *args, **kwargs))
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the threads {self._name!r} are closed")
            self._waiting.append(call)
            self._serve_more()
        return call

    def _serve_more(self) -> None:
        if len(self._waiting) <= self._idle:
            self._changed.notify()
        elif self._serving < self._most:
            self._serving += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            with self._changed:
                if call not in self._running:
                    self.given_up -= 1
                    return
                self._running.discard(call)
                if self._closed:
                    self._changed.notify_all()

    def _next(self) -> _Call | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed, IDLE_THREAD_S)
            self._idle -= 1
            if not self._waiting:
                self._serving -= 1
                return None
            call = self._waiting.popleft()
            self._running.add(call)
            return call

    def give_up(self, call: _Call) -> None:
        """Let another thread replace the one that runs `call`."""
        with self._changed:
            if call in self._running and not call.done():
                self._running.discard(call)
                self._serving -= 1
                self.given_up += 1
                if self._waiting:
                    self._serve_more()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait briefly for the calls; a hanging call ends with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if wait:
                self._changed.wait_for(lambda: not self._waiting and not self._running, CANCEL_S)


_threads = DaemonExecutor(MAX_CALLS, "call")
_own_threads = DaemonExecutor(1 << 20, "program")


async def in_thread(function: Callable[..., T], *given: Any, **named: Any) -> T:
    """The result of a synchronous function, which runs in a thread.

    If the caller is cancelled, the call continues unobserved, in a thread that is replaced and
    does not keep the process from ending.

    Raises:
        RunFailed: too many earlier calls have not returned.
    """
    return await _run_in(_threads, functools.partial(function, *given, **named))


async def in_own_thread(function: Callable[..., T], *given: Any, **named: Any) -> T:
    """Like `in_thread`, but without waiting for a thread: for calls that wait for rollouts."""
    return await _run_in(_own_threads, functools.partial(function, *given, **named))


async def _run_in(threads: DaemonExecutor, call: Callable[[], T]) -> T:
    if threads.given_up >= MAX_HANGING:
        raise RunFailed(
            f"{threads.given_up} calls of synchronous functions have not returned since they were"
            " given up; give them a deadline of their own, or make them async"
        )
    work = functools.partial(contextvars.copy_context().run, call)
    return await asyncio.get_running_loop().run_in_executor(threads, work)


# --- loops in threads -----------------------------------------------------------------------------


class LoopThread:
    """Runs an asyncio loop in a daemon thread, for synchronous code."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        # used by `asyncio.to_thread`
        self.loop.set_default_executor(DaemonExecutor(MAX_OWN, name))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return
            # recovery: a plugin's task called sys.exit, which leaves the loop; the error also
            # reaches the caller that awaits the task
            except (SystemExit, KeyboardInterrupt) as error:
                logger.warning("a task of a plugin raised %r, which is ignored here", error)

    def call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        """Run `work` in the loop and wait for its result.

        `work` keeps its own deadline; `seconds` is a last resort.

        Raises:
            DeadlineExceeded: the loop did not answer: its thread is blocked.
        """
        limit = seconds + LOOP_GRACE_S
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(limit)
        except FutureTimeout as error:
            # a TimeoutError of the work itself
            if future.done():
                raise
            raise DeadlineExceeded(
                f"{what}: no answer after {limit:.0f} s; an engine, workflow or filter blocks the"
                " rollout thread"
            ) from error
        finally:
            # a no-op if it is done; otherwise (after an interrupt, say) it ends the work
            future.cancel()

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
    await cancel(*(asyncio.all_tasks() - {asyncio.current_task()}))
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
