"""Jobs of the recorder: their order, how many wait, what becomes of errors."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlcore.errors import DeadlineExceeded
from rlcore.runs.directory import RunDirectory
from rlcore.runs.recorder import RolloutRecorder

LIMIT_S = 60.0


def recorder_of(folder: Path, limit_s: float = LIMIT_S) -> RolloutRecorder:
    return RolloutRecorder(RunDirectory(folder), keep=None, collective_timeout_s=2 * limit_s)


def join() -> None:
    """Wait for the end of the threads, which needs no deadline of the recorder."""
    for thread in threading.enumerate():
        if thread.name == "recorder":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_jobs_run_in_order_and_their_threads_end(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    done: list[int] = []
    for life in range(2):
        for number in range(50):
            recorder.submit("a number", lambda number=number: done.append(number))  # type: ignore[misc]
        recorder.finish()
        assert done == [*range(50)] * (life + 1)
        join()


def test_nobody_waits_for_a_job_until_too_many_are_unfinished(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path, limit_s=0.2)
    gate = threading.Event()
    done: list[str] = []

    def first() -> None:
        assert gate.wait(LIMIT_S)
        done.append("first")

    recorder.submit("the first", first)
    recorder.submit("the second", lambda: done.append("second"))
    assert done == [], "both calls returned"
    with pytest.raises(DeadlineExceeded, match=r"the first: not done after 0\.2 s \(half of clus"):
        recorder.submit("the third", lambda: done.append("third"))
    with pytest.raises(DeadlineExceeded, match="the first"):
        recorder.finish()
    gate.set()
    join()
    recorder.finish()
    assert done == ["first", "second"]


def test_an_error_comes_out_wherever_one_waits_next_and_is_the_end(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    gate = threading.Event()
    done: list[str] = []

    def fail() -> None:
        assert gate.wait(LIMIT_S)
        raise OSError(28, "No space left on device")

    recorder.submit("a write", fail)
    recorder.submit("another", lambda: done.append("another"))
    gate.set()
    with pytest.raises(OSError, match="No space left"):
        recorder.finish()
    with pytest.raises(OSError, match="No space left"):
        recorder.submit("more", lambda: done.append("more"))
    assert done == []
