"""Counts requests to end a run: signals of the driver's process, and `rlcore stop`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from rlcore.launch.signals import handling_stop_signals


class StopRequests:
    """Counts requests: the first asks for a clean end after this step, the second ends at once."""

    def __init__(self) -> None:
        self.count = 0
        self._interrupts = False
        self._run_status: Any = None
        self._stops = 0  # requests in `count` that came from the run status
        # The call that returns when the run status has one more; none once that actor is lost.
        self._next_stop: list[Any] = []

    @contextmanager
    def counting_signals(self) -> Iterator[None]:
        """Only count signals while open, so that they do not interrupt what is being closed."""

        def count(_number: int, _frame: object) -> None:
            self.count += 1
            if self._interrupts and self.count > 1:
                raise KeyboardInterrupt

        with handling_stop_signals(count):
            yield

    @contextmanager
    def interrupting_on_second(self) -> Iterator[None]:
        """Let a second signal raise KeyboardInterrupt in the main thread while open."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def follow(self, run_status: Any) -> None:
        """Count the requests that `rlcore stop` makes at this actor."""
        self._run_status = run_status
        self._await_stop()

    def check(self) -> None:
        """Count a new request of the run status; never waits."""
        if not self._next_stop or not ray.wait(self._next_stop, timeout=0)[0]:
            return
        try:
            ray.get(self._next_stop)
        except RayError:  # the actor is lost, and `rlcore stop` with it
            self._next_stop = []
            return
        self.count += 1
        self._stops += 1
        self._await_stop()

    def _await_stop(self) -> None:
        self._next_stop = [self._run_status.until_stop.remote(self._stops + 1)]
