"""Output of actors on the driver's terminal."""

from __future__ import annotations

import psutil
import pytest
import torch.distributed as dist

from rlcore.launch.ray import actor_env
from rlcore.launch.ray.actor_env import LONGEST_LINE, LogRelay, RemoteStdout, line_key

HOST = "127.0.0.1"


@pytest.fixture
def relay() -> LogRelay:
    return LogRelay(HOST)


@pytest.fixture
def store(relay: LogRelay) -> dist.Store:
    """The store as an actor opens it."""
    return dist.TCPStore(HOST, relay.port, None, False, wait_for_workers=False)


def test_it_listens_on_the_drivers_address_alone(relay: LogRelay) -> None:
    """Whoever reaches it prints on the driver's terminal."""
    found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
    assert [address.ip for address in found if address.port == relay.port] == [HOST]


def half_sent(store: dist.Store) -> int:
    """The number of a line whose process was killed before its text was there."""
    return store.add("lines", 1)


def test_lines_come_in_their_order_each_on_its_stream(
    relay: LogRelay, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    print("one", file=RemoteStdout(store, "out"))
    print("a warning", file=RemoteStdout(store, "err"))
    print("two", file=RemoteStdout(store, "out"))
    relay.show()
    assert capsys.readouterr() == ("one\ntwo\n", "a warning\n")
    relay.show()
    assert capsys.readouterr() == ("", "")
    assert not store.check([line_key(1)]), "the run may be long"


def test_a_line_whose_text_never_comes_is_skipped(
    relay: LogRelay,
    store: dist.Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(actor_env.time, "monotonic", lambda: now)
    half_sent(store)
    print("later", file=RemoteStdout(store, "out"))
    relay.show()
    now += 0.9 * actor_env.HALF_SAID_S
    relay.show()
    assert capsys.readouterr().out == "", "its text may be on its way"
    now += 0.2 * actor_env.HALF_SAID_S
    relay.show()
    assert capsys.readouterr().out == "later\n"


def test_a_line_whose_text_comes_late_is_shown(
    relay: LogRelay, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    number = half_sent(store)
    relay.show()
    print("two", file=RemoteStdout(store, "out"))
    store.set(line_key(number), "out one\n")
    relay.show()
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_line_does_not_steer_the_terminal(
    relay: LogRelay, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    print("\x1b[2Jgone", file=RemoteStdout(store, "out"))
    print("x" * 10 * LONGEST_LINE, file=RemoteStdout(store, "err"))
    relay.show()
    shown = capsys.readouterr()
    assert shown.out == "\\x1b[2Jgone\n"
    assert len(shown.err) == LONGEST_LINE


def test_when_all_actors_have_ended_there_is_no_wait(
    relay: LogRelay, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    half_sent(store)
    print("the last word", file=RemoteStdout(store, "out"))
    relay.show(wait_s=0.0)
    assert capsys.readouterr().out == "the last word\n"
