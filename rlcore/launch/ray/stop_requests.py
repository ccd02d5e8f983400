"""Requests to end a run: signals of the driver's process, and `rlcore stop` in any shell of the
cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from rlcore.launch.signals import hearing


class EndRequests:
    """How many came: the first asks for a clean end after the step at hand, a second one for the
    end at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ends_at_once = False
        self._run_status: Any = None
        self._stops = 0  # of `count`, those that were said on the run_status
        # the call that returns when the run_status has another one
        self._next_stop: list[Any] = []

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Signals are counted, and end nothing by themselves: not what is being closed."""

        def heed(_number: int, _frame: object) -> None:
            self.count += 1
            if self._ends_at_once and self.count > 1:
                raise KeyboardInterrupt

        with hearing(heed):
            yield

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """A second signal raises KeyboardInterrupt wherever the main thread is."""
        self._ends_at_once = True
        try:
            yield
        finally:
            self._ends_at_once = False

    def heed(self, run_status: Any) -> None:
        """What is said on it from now on."""
        self._run_status = run_status
        self._await_stop()

    def look(self) -> None:
        """Count what the run_status has; never waits."""
        if not self._next_stop or not ray.wait(self._next_stop, timeout=0)[0]:
            return
        try:
            ray.get(self._next_stop)
        except RayError:  # the run_status is lost: nobody can say it any more
            self._next_stop = []
            return
        self.count += 1
        self._stops += 1
        self._await_stop()

    def _await_stop(self) -> None:
        self._next_stop = [self._run_status.until_stop.remote(self._stops + 1)]
