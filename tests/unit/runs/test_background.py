"""Jobs in a thread: their order, how many wait, what becomes of errors."""

from __future__ import annotations

import threading

import pytest

from rlcore.errors import DeadlineExceeded
from rlcore.runs.recorder import Background

LIMIT_S = 60.0


def join(name: str) -> None:
    """Wait for the end of the thread, which needs no deadline of `Background`."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_jobs_run_in_order_and_the_thread_ends() -> None:
    background = Background("test of jobs", most=3, timeout_s=LIMIT_S, limit="")
    done: list[int] = []
    for life in range(2):
        for number in range(50):
            background.submit("a number", lambda number=number: done.append(number))  # type: ignore[misc]
        background.finish()
        assert done == [*range(50)] * (life + 1)
        join("test of jobs")


def test_nobody_waits_for_a_job_until_too_many_are_unfinished() -> None:
    background = Background("waits", most=2, timeout_s=0.2, limit="half of a key")
    gate = threading.Event()
    done: list[str] = []

    def first() -> None:
        assert gate.wait(LIMIT_S)
        done.append("first")

    background.submit("the first", first)
    background.submit("the second", lambda: done.append("second"))
    assert done == [], "both calls returned"
    with pytest.raises(DeadlineExceeded, match=r"the first: not done after 0\.2 s \(half of a"):
        background.submit("the third", lambda: done.append("third"))
    with pytest.raises(DeadlineExceeded, match="the first"):
        background.finish()
    gate.set()
    join("waits")
    background.finish()
    assert done == ["first", "second"]


def test_an_error_comes_out_wherever_one_waits_next_and_is_the_end() -> None:
    background = Background("fails", most=2, timeout_s=LIMIT_S, limit="")
    gate = threading.Event()
    done: list[str] = []

    def fail() -> None:
        assert gate.wait(LIMIT_S)
        raise OSError(28, "No space left on device")

    background.submit("a write", fail)
    background.submit("another", lambda: done.append("another"))
    gate.set()
    with pytest.raises(OSError, match="No space left"):
        background.finish()
    with pytest.raises(OSError, match="No space left"):
        background.submit("more", lambda: done.append("more"))
    assert done == []
