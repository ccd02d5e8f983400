"""Calls of the service's process, and what is done about one that died or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlcore.config import Config
from rlcore.deadlines import SERVICE_ANSWER_S
from rlcore.errors import ConfigError, DeadlineExceeded, RunFailed
from rlcore.launch.service import client as client_module
from rlcore.launch.service.client import ServiceClient, ServiceLost

# A process that answers nothing for so long hangs.
BEATS_S = 20.0
OPENED = {"greedy_baseline": True, "again": False}


def make_config(**sections: Any) -> Config:
    given: dict[str, Any] = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"paths": ["d"]}}
    given |= {"training": {"steps": 1}, "cluster": {"heartbeat_timeout_s": BEATS_S}}
    return Config.model_validate(given | sections)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceClient]:
    """A client of `answering_child`, which is open."""
    monkeypatch.setattr(client_module, "MODULE", "tests.unit.launch.service.answering_child")
    client = ServiceClient(make_config())
    opened: Any = client.open(make_config(), greedy_baseline=True)
    assert opened == OPENED
    yield client
    client.close()
    assert not psutil.pid_exists(client.pid)


def test_calls_are_answered_in_any_order(
    client: ServiceClient, capsys: pytest.CaptureFixture[str]
) -> None:
    late = client._process.call("late")
    array = np.arange(100_000)
    [found] = client.call("echo", array)
    assert np.array_equal(found, array)
    assert late.result(60) == "late"
    assert capsys.readouterr().out.splitlines()[0] == r"heard\x1b[2J"


def test_an_error_of_the_service_is_raised_as_it_was(client: ServiceClient) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.filters: no such filter"):
        client.call("raise")


def test_no_answer_is_waited_for_without_end(client: ServiceClient) -> None:
    client.config.cluster.heartbeat_timeout_s = 0.01
    with pytest.raises(DeadlineExceeded, match=r"service: late: no answer within 0\.02 s \(a\.b\)"):
        client.call("late", limit_s=0.01, key="a.b")


@pytest.mark.parametrize(
    "end", ["die", "nonsense", "kill", pytest.param("hang", marks=pytest.mark.rest)]
)
def test_what_is_asked_of_a_process_that_is_gone_fails_and_another_takes_its_place(
    client: ServiceClient, end: str
) -> None:
    waiting = client._process.call("late")
    before = client.pid
    if end in ("kill", "hang"):
        # until then it only starts
        while not client.call("beats"):
            time.sleep(0.05)
        os.kill(before, signal.SIGKILL if end == "kill" else signal.SIGSTOP)
    else:
        client._process.call(end)
    with pytest.raises(ServiceLost, match="its process is gone"):
        waiting.result(60)
    with pytest.raises(ServiceLost):
        client.call("echo")
    client.reopen()
    assert client.pid != before
    assert client.call("echo", 2) == (2,)


def test_a_service_that_dies_again_and_again_ends_the_run(
    client: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_STARTS", 2)
    for may_start in (True, False):
        with pytest.raises(ServiceLost):
            client.call("die")
        if may_start:
            client.reopen()
    with pytest.raises(RunFailed, match="died 2 times in this run"):
        client.reopen()


def test_a_process_that_hangs_is_killed_at_the_end(
    client: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CLOSE_SERVICE_S", 0.1)
    monkeypatch.setattr(client_module, "END_RANK_S", 0.1)
    os.kill(client.pid, signal.SIGSTOP)
    began = time.monotonic()
    client.close()
    # END_RANK_S may be too short for the system to end it
    while psutil.pid_exists(client.pid):
        assert time.monotonic() - began < 30
        time.sleep(0.01)
    assert time.monotonic() - began < 30


# --- a replacement --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["started", "restarted ranks", "neither"])
def test_a_replacement_may_go_on_without_some_engines(
    client: ServiceClient, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "started":
        client.start()
    if how == "restarted ranks":
        monkeypatch.setenv("RLCORE_RESTARTED", "1")
    with pytest.raises(ServiceLost):
        client.call("die")
    opened: Any = client.open(make_config(), greedy_baseline=True)
    assert opened == {**OPENED, "again": how != "neither"}


def test_a_replacement_has_time_for_a_long_journal_and_a_large_buffer(
    monkeypatch: pytest.MonkeyPatch, client: ServiceClient
) -> None:
    asked: dict[Any, float] = {}

    def call(_: ServiceClient, part: str, *given: Any, limit_s: float = 0.0, key: str = "") -> None:
        asked[given[0]] = limit_s or SERVICE_ANSWER_S

    monkeypatch.setattr(ServiceClient, "_open", lambda client: None)
    monkeypatch.setattr(ServiceClient, "call", call)
    client.published(1, 2, 0)
    client.keep_ledger(Path("ledger.jsonl"))
    client.restore({})
    asked.clear()
    client.reopen()
    start_s = client.config.cluster.start_timeout_s
    assert start_s > SERVICE_ANSWER_S
    assert list(asked.items()) == [
        ("restore", start_s),
        ("keep_ledger", start_s),
        ("published", SERVICE_ANSWER_S),
    ]


def test_a_publication_to_engines_that_take_turns_says_that_the_service_is_lost(
    client: ServiceClient,
) -> None:
    """Only a loss makes a launcher restart the ranks; an error of a rank does not."""
    client.config = make_config(rollout={"engine": {"colocated": True}})
    with pytest.raises(ServiceLost):
        client.call("die")
    with pytest.raises(
        ServiceLost, match="it is unknown how much of the trainer's GPU memory its engines hold"
    ):
        client.begin_publication("open", ())


def test_a_publication_opens_at_the_replacement_of_a_lost_service(client: ServiceClient) -> None:
    before = client.pid
    with pytest.raises(ServiceLost):
        client.call("die")
    with pytest.raises(ServiceLost):
        client.begin_publication("send", 0, {}).result(60)
    assert client.begin_publication("open", 1).result(60) == ("open", 1)
    assert client.pid != before
