"""Threads for calls that may never return: they are replaced, and end with the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from rlcore.deadlines import CANCEL_S, IDLE_THREAD_S

T = TypeVar("T")


class _Call(Future[Any]):
    """A call of a function, in a thread of a `DaemonExecutor`."""

    def __init__(self, executor: DaemonExecutor, function: Callable[[], Any]) -> None:
        super().__init__()
        self._executor = executor
        self._function = function
        self.given_up = False
        self.ended = False

    def cancel(self) -> bool:
        """Give the call up; one that runs already goes on unheeded, and its thread is replaced."""
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
        most: calls that run side by side; others wait.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(1, name)  # asyncio asks for this class; no thread of its own is started
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._called = threading.Condition(self._lock)
        self._returned = threading.Condition(self._lock)
        self._calls: deque[_Call] = deque()
        self._open: set[_Call] = set()  # waiting or running, and not given up
        self._serving = 0  # threads whose call was not given up
        self._idle = 0
        self._closed = False
        self.given_up = 0  # calls that go on unheeded

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        call = _Call(self, partial(function, *args, **kwargs))
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name!r} are closed")
            self._calls.append(call)
            self._open.add(call)
            self._serve_more()
        return call

    def _serve_more(self) -> None:
        if len(self._calls) <= self._idle:
            self._called.notify()
        elif self._serving < self._most:
            self._serving += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            with self._lock:
                call.ended = True
                self._open.discard(call)
                self._returned.notify_all()
                if call.given_up:
                    self.given_up -= 1
                    return

    def _next(self) -> _Call | None:
        with self._lock:
            self._idle += 1
            self._called.wait_for(lambda: self._calls or self._closed, IDLE_THREAD_S)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._serving -= 1
            return None

    def give_up(self, call: _Call) -> None:
        """Let another thread take the place of the one that runs `call`."""
        with self._lock:
            if call.ended or call.given_up or call.done():
                return
            call.given_up = True
            self._open.discard(call)
            self._serving -= 1
            self.given_up += 1
            if self._calls:
                self._serve_more()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the calls, but not for long: what hangs ends with the process."""
        with self._lock:
            self._closed = True
            self._called.notify_all()
            if wait:
                self._returned.wait_for(lambda: not self._open, CANCEL_S)
