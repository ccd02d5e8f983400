"""Calls of a child process: whose answer it is, and what is heard of one that died or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from rlcore.config import Config
from rlcore.errors import ConfigError, DeadlineExceeded, RunFailed
from rlcore.launch.service import child_channel
from rlcore.launch.service.channel import ServiceLost
from rlcore.launch.service.child_channel import ChildChannel

BEATS_S = 20.0  # without an answer: it hangs
LIMIT: dict[str, Any] = {"limit_s": 60.0, "what": "the service", "key": "a.key"}


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildChannel]:
    """A channel to `answering_child`, which is open."""
    monkeypatch.setattr(child_channel, "MODULE", "tests.unit.launch.service.answering_child")
    channel = ChildChannel()
    given: dict[str, Any] = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"paths": ["d"]}}
    given |= {"training": {"steps": 1}, "cluster": {"heartbeat_timeout_s": BEATS_S}}
    channel.begin(Config.model_validate(given), 1)
    assert opened(channel) == {"greedy_baseline": True}
    yield channel
    channel.close()
    assert channel.pid is None or not psutil.pid_exists(channel.pid)


def opened(channel: ChildChannel) -> object:
    return channel.open(greedy_baseline=True, **LIMIT)


def test_calls_are_answered_in_any_order(
    channel: ChildChannel, capsys: pytest.CaptureFixture[str]
) -> None:
    late = channel.send("late")
    array = np.arange(100_000)
    [found] = channel.get(channel.send("echo", array), **LIMIT)
    assert np.array_equal(found, array)
    assert channel.get(late, **LIMIT) == "late"
    assert asyncio.run(channel.answer(channel.send("echo", 1), what="the service")) == (1,)
    assert capsys.readouterr().out.splitlines()[0] == r"heard\x1b[2J"


def test_an_error_of_the_service_is_raised_as_it_was(channel: ChildChannel) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.filters: no such filter"):
        channel.get(channel.send("raise"), **LIMIT)


def test_no_answer_is_waited_for_without_end(channel: ChildChannel) -> None:
    with pytest.raises(DeadlineExceeded, match=r"the service: no answer within 0\.01 s \(a\.key\)"):
        channel.get(channel.send("late"), limit_s=0.01, what="the service", key="a.key")


@pytest.mark.parametrize("end", ["die", "nonsense", "kill", "hang"])
def test_what_is_asked_of_a_child_that_is_gone_fails_and_another_takes_its_place(
    channel: ChildChannel, end: str
) -> None:
    waiting = channel.send("late")
    before = channel.pid
    assert before is not None
    if end in ("kill", "hang"):
        while not channel.get(channel.send("beats"), **LIMIT):  # until then it only starts
            time.sleep(0.05)
        os.kill(before, signal.SIGKILL if end == "kill" else signal.SIGSTOP)
    else:
        channel.send(end)
    with pytest.raises(ServiceLost, match="its process is gone"):
        channel.get(waiting, **LIMIT)
    with pytest.raises(ServiceLost):
        channel.get(channel.send("echo"), **LIMIT)
    assert opened(channel) == {"greedy_baseline": True}
    assert channel.pid != before
    assert channel.get(channel.send("echo", 2), **LIMIT) == (2,)


def test_a_service_that_dies_again_and_again_ends_the_run(
    channel: ChildChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_channel, "MOST_STARTS", 2)
    for may_start in (True, False):
        with pytest.raises(ServiceLost):
            channel.get(channel.send("die"), **LIMIT)
        if may_start:
            opened(channel)
    with pytest.raises(RunFailed, match="died 2 times in this run"):
        opened(channel)


def test_a_child_that_hangs_is_killed_at_the_end(
    channel: ChildChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_channel, "CLOSE_SERVICE_S", 0.1)
    monkeypatch.setattr(child_channel, "END_RANK_S", 0.1)
    assert channel.pid is not None
    os.kill(channel.pid, signal.SIGSTOP)
    began = time.monotonic()
    channel.close()
    while psutil.pid_exists(channel.pid):  # END_RANK_S may be too short for the system to end it
        assert time.monotonic() - began < 30
        time.sleep(0.01)
    assert time.monotonic() - began < 30
