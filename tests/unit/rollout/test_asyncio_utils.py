"""Waiting with a limit: which work is cancelled, whose deadline it was, and threads that hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from rlcore.errors import DeadlineExceeded, RunFailed
from rollout import asyncio_utils as deadlines
from rollout.asyncio_utils import DaemonExecutor, LoopThread, gather_or_cancel, in_thread, within

LIMIT_S = 20


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


async def deaf(over: asyncio.Event) -> None:
    """Work that goes on when it is cancelled, until `over`."""
    while not over.is_set():
        try:
            await over.wait()
        except asyncio.CancelledError:
            continue


def test_of_all_results_each_is_in_its_place() -> None:
    async def after(seconds: float, value: str) -> str:
        await asyncio.sleep(seconds)
        return value

    assert run(gather_or_cancel(after(0.02, "a"), after(0.0, "b"), after(0.01, "c"))) == [
        "a",
        "b",
        "c",
    ]


def test_after_the_first_error_nothing_goes_on() -> None:
    done: list[str] = []

    async def long_work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.01)  # it cleans up
            done.append("cleaned")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def main() -> None:
        with pytest.raises(ValueError, match="no"):
            await gather_or_cancel(long_work(), fails(), long_work())
        assert done == ["cleaned"] * 2, "before the error is out"

    run(main())


def test_a_cancelled_gather_cancels_all_its_work() -> None:
    ended: list[int] = []

    async def long_work(index: int) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(index)

    async def main() -> None:
        task = asyncio.ensure_future(gather_or_cancel(long_work(0), long_work(1)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(ended) == [0, 1]

    run(main())


def after_an_error(over: asyncio.Event) -> Coroutine[Any, Any, Any]:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("the error")

    return gather_or_cancel(deaf(over), fails())


def at_a_deadline(over: asyncio.Event) -> Coroutine[Any, Any, Any]:
    return within(0.01, deaf(over), lambda: "the error")


@pytest.mark.parametrize("waits", [after_an_error, at_a_deadline])
def test_work_that_resists_is_not_waited_for_long(
    waits: Callable[[asyncio.Event], Coroutine[Any, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "CANCEL_S", 0.05)

    async def main() -> None:
        over = asyncio.Event()
        began = time.monotonic()
        with pytest.raises((ValueError, DeadlineExceeded), match="the error"):
            await waits(over)
        assert time.monotonic() - began < 15
        over.set()
        await asyncio.sleep(0)

    run(main())


def test_a_deadline_inside_the_work_is_the_works() -> None:
    async def work() -> None:
        raise TimeoutError("its own")

    with pytest.raises(asyncio.TimeoutError, match="its own"):
        run(within(10, work(), lambda: "ours"))


def test_the_message_tells_of_the_moment_before_anything_is_cancelled() -> None:
    waiting = ["engine-0"]

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            waiting.clear()

    with pytest.raises(DeadlineExceeded, match="engine-0"):
        run(within(0.01, work(), lambda: f"waiting for {waiting}"))


def test_a_call_from_another_thread_ends_at_its_deadline_and_its_work_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "LOOP_GRACE_S", 0.05)
    thread = LoopThread("under test")
    began = threading.Event()
    ended = threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(10)
        finally:
            ended.set()

    try:
        with pytest.raises(DeadlineExceeded, match="the work: no answer"):
            thread.call(work(), 0.0, "the work")
        # on a busy machine the loop may come to it too late, and it never begins
        thread.call(asyncio.sleep(0), seconds=60, what="all that came before")
        assert not began.is_set() or ended.wait(60)
    finally:
        thread.close()
    assert thread.loop.is_closed()


def test_a_task_that_calls_exit_ends_itself_and_not_the_loop() -> None:
    """asyncio lets SystemExit out of the loop, and the thread would be gone."""
    thread = LoopThread("under test")

    async def exits() -> None:
        await asyncio.sleep(0)
        raise SystemExit(3)

    async def main() -> str:
        try:
            await asyncio.ensure_future(exits())
        except SystemExit as error:
            return f"exit {error.code}"
        return "nothing"

    assert thread.call(main(), seconds=5, what="a task that exits") == "exit 3"
    assert thread.call(asyncio.sleep(0, "alive"), seconds=5, what="another") == "alive"
    thread.close()


def test_a_thread_that_hangs_holds_up_neither_the_loop_nor_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = LoopThread("under test")
    over = threading.Event()

    async def main() -> str:
        hanging = [asyncio.ensure_future(in_thread(over.wait)) for _ in range(3)]
        hanging += [asyncio.ensure_future(asyncio.to_thread(over.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        for call in hanging:
            call.cancel()
        await asyncio.wait(hanging)
        return await in_thread(str, 7) + await asyncio.to_thread(str, 8)

    monkeypatch.setattr(deadlines, "CANCEL_S", 600.0)
    assert thread.call(main(), seconds=60, what="calls that hang") == "78"
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 15, "what was given up is not waited for"
    over.set()


def test_too_many_hanging_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "MAX_HANGING", 0)
    with pytest.raises(RunFailed, match="have not returned since they were given up"):
        run(in_thread(str))


# --- threads --------------------------------------------------------------------------------------


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_calls_wait_for_a_thread_unless_one_is_given_up(over: threading.Event) -> None:
    threads = DaemonExecutor(1, "under test")
    began = threading.Event()

    def hang() -> None:
        began.set()
        over.wait()

    hanging = threads.submit(hang)
    waiting = threads.submit(str, 7)
    assert began.wait(LIMIT_S)
    assert not wait([waiting], timeout=0.1).done
    assert hanging.cancel() is False
    assert hanging.cancel() is False, "it is given up once"
    assert waiting.result(LIMIT_S) == "7"
    assert threads.given_up == 1
    over.set()
    hanging.result(LIMIT_S)
    assert threads.submit(str, 8).result(LIMIT_S) == "8"


def test_threads_are_used_again_and_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = DaemonExecutor(8, "idle ones")
    used = set()
    for _ in range(100):
        used.add(threads.submit(threading.get_ident).result(LIMIT_S))
        end = time.monotonic() + LIMIT_S
        while not threads._idle:  # else the next call would start another thread
            assert time.monotonic() < end
            time.sleep(0)
    assert len(used) == 1
    monkeypatch.setattr(deadlines, "IDLE_THREAD_S", 0.05)
    threads.submit(str).result(LIMIT_S)
    for thread in [t for t in threading.enumerate() if t.name == "idle ones"]:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert threads.submit(str, 1).result(LIMIT_S) == "1"


def test_errors_and_exits_belong_to_the_caller() -> None:
    threads = DaemonExecutor(1, "under test")
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(LIMIT_S)
    assert threads.submit(str, 1).result(LIMIT_S) == "1"


def test_after_its_end_it_takes_no_call(over: threading.Event) -> None:
    threads = DaemonExecutor(2, "under test")
    threads.submit(str).result(LIMIT_S)
    threads.shutdown()
    with pytest.raises(RuntimeError, match="'under test' are closed"):
        threads.submit(str)


def test_a_hanging_call_does_not_keep_the_process() -> None:
    program = (
        "import time; from rollout.asyncio_utils import DaemonExecutor;"
        "DaemonExecutor(1, 'x').submit(time.sleep, 600); print('done')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "done\n"
