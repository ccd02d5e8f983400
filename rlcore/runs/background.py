"""Work that nobody waits for, done in order in one thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rlcore.errors import DeadlineExceeded

Job = tuple[str, Callable[[], None]]


class Background:
    """Runs one job after another in a thread, which ends when there is none.

    A job that fails is the last one: whoever comes next gets its error.

    Args:
        most: jobs that may be unfinished; `submit` waits for the oldest where there are as many.
        timeout_s: of a wait.
        limit: what `timeout_s` follows from, for the error.
    """

    def __init__(self, name: str, *, most: int, timeout_s: float, limit: str) -> None:
        self._name = name
        self._most = most
        self._timeout_s = timeout_s
        self._limit = limit
        self._jobs: deque[Job] = deque()  # the first one is running
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def submit(self, what: str, work: Callable[[], None]) -> None:
        """Have `work` done after what was submitted before.

        Raises:
            DeadlineExceeded: too many jobs do not end.
            BaseException: what a job before this one raised.
        """
        with self._changed:
            self._wait_until_left(self._most - 1)
            self._jobs.append((what, work))
            if len(self._jobs) == 1:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def finish(self) -> None:
        """Wait until all is done. Raises as `submit` does."""
        with self._changed:
            self._wait_until_left(0)

    def _wait_until_left(self, most: int) -> None:
        ended = self._changed.wait_for(
            lambda: self._failure is not None or len(self._jobs) <= most, self._timeout_s
        )
        if not ended:
            what, _ = self._jobs[0]
            raise DeadlineExceeded(f"{what}: not done after {self._timeout_s:g} s ({self._limit})")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        job = self._jobs[0]
        while True:
            failure: BaseException | None = None
            try:
                job[1]()
            except BaseException as error:  # noqa: BLE001 - recovery: raised where one waits
                failure = error
            with self._changed:
                self._failure = failure
                self._jobs.popleft()
                self._changed.notify_all()
                if failure is not None or not self._jobs:
                    return
                job = self._jobs[0]
