"""Event loops with a clock of their own, which no busy machine makes run too far."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")
STEP_S = 1e-5  # a round of a patient loop, so that who waits in rounds sees time pass
MOST_S = 0.002  # that a round of a steady loop takes by its clock, beside its wait


class PatientLoop(asyncio.SelectorEventLoop):
    """Its time goes on to the next timer, at once, when nothing else is left to do.

    It stands still while a call in a thread goes on. So whatever becomes ready before a timer comes
    before it, even if this process is held up for seconds. For what talks to no other process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self._in_threads = 0
        self._look: Any = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._pass_time  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def run_in_executor(self, *given: Any) -> Any:
        future = super().run_in_executor(*given)
        self._in_threads += 1
        future.add_done_callback(self._came_back)
        return future

    async def shutdown_default_executor(self, *given: Any) -> None:
        self._in_threads += 1
        await super().shutdown_default_executor(*given)
        self._in_threads -= 1

    def _came_back(self, _: object) -> None:
        self._in_threads -= 1

    def _pass_time(self, timeout: float | None) -> Any:
        if timeout is None or self._in_threads:
            return self._look(0 if timeout == 0 else None)
        self._now += max(timeout, STEP_S)
        return self._look(0)


class SteadyLoop(asyncio.SelectorEventLoop):
    """Its time passes as it waits; time in which this process is held up hardly counts.

    For clients and servers in one loop, whose bytes need many rounds of it to come through.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self._seen = super().time()
        self._look: Any = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._wait  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def _pass_time(self, most: float) -> None:
        before, self._seen = self._seen, super().time()
        self._now += min(self._seen - before, most)

    def _wait(self, timeout: float | None) -> Any:
        self._pass_time(MOST_S)
        try:
            return self._look(timeout)
        finally:
            self._pass_time(MOST_S if timeout is None else max(timeout, MOST_S))


# in the place of a module's `time`
LOOP_TIME = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())


def run_patiently(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` as `asyncio.run` does, in a `PatientLoop`."""
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        return runner.run(work)


def run_steadily(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` as `asyncio.run` does, in a `SteadyLoop`."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        return runner.run(work)
