"""Threads that are replaced when a call hangs, and end with the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from rollout import daemon_threads
from rollout.daemon_threads import DaemonExecutor

LIMIT_S = 20


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
    monkeypatch.setattr(daemon_threads, "IDLE_THREAD_S", 0.05)
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
        "import time; from rollout.daemon_threads import DaemonExecutor;"
        "DaemonExecutor(1, 'x').submit(time.sleep, 600); print('done')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "done\n"
