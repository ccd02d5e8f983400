"""The actor of a run, what others do with it, and errors of calls, without a cluster."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from rlcore.errors import DeadlineExceeded, RunFailed
from rlcore.launch.ray import status
from rlcore.launch.ray.calls import ActorLost, translate_error
from rlcore.launch.ray.status import MAX_LINE, Requests, RunStatus


class Handle:
    """The handle of an actor in this process; a call is done at once, and its own result."""

    def __init__(self) -> None:
        self.actor = RunStatus()
        self.is_lost = False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self.actor, method))


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    handle = Handle()

    def get(found: Any, **_: Any) -> Any:
        if handle.is_lost:
            raise ActorLost("gone")
        return found

    def ray_get(found: Any, **_: Any) -> Any:
        if handle.is_lost:
            raise RayActorError
        return found

    monkeypatch.setattr(status, "status_of", lambda run: handle)
    monkeypatch.setattr(status, "get", get)
    monkeypatch.setattr(status.ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(status.ray, "get", ray_get)
    return handle


@pytest.fixture
def requests(handle: Handle) -> Requests:
    made = Requests()
    made.follow(handle)
    return made


def said_by_rank_0(monkeypatch: pytest.MonkeyPatch, *lines: tuple[str, str]) -> None:
    with monkeypatch.context() as patched:
        for stream in ("stdout", "stderr"):
            patched.setattr(sys, stream, getattr(sys, stream))
        status.print_on_driver("a")
        for stream, line in lines:
            print(line, file=getattr(sys, stream))


def test_lines_come_in_their_order_each_on_its_stream(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said_by_rank_0(monkeypatch, ("stdout", "one"), ("stderr", "a warning"), ("stdout", "two"))
    requests.finish()
    assert capsys.readouterr() == ("one\ntwo\n", "a warning\n")
    requests.finish()
    assert capsys.readouterr() == ("", "")


def test_a_line_does_not_steer_the_terminal(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * 10 * MAX_LINE
    said_by_rank_0(monkeypatch, ("stdout", "\x1b[2Jgone"), ("stderr", long))
    requests.finish()
    shown = capsys.readouterr()
    assert shown.out == "\\x1b[2Jgone\n"
    assert len(shown.err) == MAX_LINE


def test_without_the_driver_rank_0_goes_on(
    requests: Requests, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle.is_lost = True
    said_by_rank_0(monkeypatch, ("stdout", "nobody hears this"))
    requests.check()
    requests.check()
    assert requests.count == 0


def test_requests_of_rlcore_stop_are_counted(requests: Requests, handle: Handle) -> None:
    for expected in (1, 2):
        handle.actor.stop()
        requests.check()  # the call that was under way
        requests.check()
        assert requests.count == expected


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_signal_ends_the_run_at_once() -> None:
    requests = Requests()
    with requests.counting_signals(), requests.interrupting_on_second():
        ask()
        assert requests.count == 1
        with pytest.raises(KeyboardInterrupt):
            ask()


def test_signals_do_not_interrupt_the_closing() -> None:
    """The exit code of the run stays."""
    before = signal.getsignal(signal.SIGTERM)
    requests = Requests()
    with requests.counting_signals():
        with requests.interrupting_on_second():
            ask()
        ask()
        assert requests.count == 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_of_ours_is_raised_as_it_was() -> None:
    ours = RunFailed("the disk is full")
    assert translate_error(RayTaskError("write", "...", ours), "rank 3") is ours
    other = translate_error(RayTaskError("write", "...", KeyError("x")), "rank 3")
    assert isinstance(other, RunFailed)
    assert str(other) == "rank 3: KeyError: 'x'"


def test_stop_waits_until_the_run_is_gone(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [["b", "a"], ["b", "a"], ["b"]]
    monkeypatch.setattr(status, "_connected", lambda address: nullcontext())
    monkeypatch.setattr(status, "POLL_S", 0.0)
    monkeypatch.setattr(status, "_runs", lambda: left.pop(0))
    assert status.stop("a", None, timeout_s=60).startswith("run a has ended")
    assert left == []
    monkeypatch.setattr(status, "_runs", lambda: ["a"])
    with pytest.raises(DeadlineExceeded, match="was asked to stop and is still running"):
        status.stop("a", None, timeout_s=0.0)
