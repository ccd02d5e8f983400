"""What actors say, on the driver's terminal."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rlcore.launch.ray import actor_env
from rlcore.launch.ray.actor_env import LogRelay, RemoteStdout, line_key

HOST = "127.0.0.1"


@pytest.fixture
def lines() -> LogRelay:
    return LogRelay(HOST)


@pytest.fixture
def store(lines: LogRelay) -> dist.Store:
    """As an actor has it."""
    return dist.TCPStore(HOST, lines.port, None, False, wait_for_workers=False)


def half_said(store: dist.Store) -> int:
    """The number of a line whose speaker was killed before its text was there."""
    return store.add("lines", 1)


def test_lines_come_in_their_order_each_on_its_stream(
    lines: LogRelay, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    print("one", file=RemoteStdout(store, "out"))
    print("a warning", file=RemoteStdout(store, "err"))
    print("two", file=RemoteStdout(store, "out"))
    lines.show()
    assert capsys.readouterr() == ("one\ntwo\n", "a warning\n")
    lines.show()
    assert capsys.readouterr() == ("", "")


def test_a_line_that_stays_half_said_is_passed_over(
    lines: LogRelay,
    store: dist.Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(actor_env.time, "monotonic", lambda: now)
    half_said(store)
    print("later", file=RemoteStdout(store, "out"))
    lines.show()
    now += 0.9 * actor_env.HALF_SAID_S
    lines.show()
    assert capsys.readouterr().out == "", "its text may be on its way"
    now += 0.2 * actor_env.HALF_SAID_S
    lines.show()
    assert capsys.readouterr().out == "later\n"


def test_a_line_whose_text_comes_late_is_shown(
    lines: LogRelay, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    number = half_said(store)
    lines.show()
    print("two", file=RemoteStdout(store, "out"))
    store.set(line_key(number), "out one\n")
    lines.show()
    assert capsys.readouterr().out == "one\ntwo\n"


def test_when_nobody_speaks_any_more_nothing_is_waited_for(
    lines: LogRelay, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    half_said(store)
    print("the last word", file=RemoteStdout(store, "out"))
    lines.show(wait_s=0.0)
    assert capsys.readouterr().out == "the last word\n"
