"""Calls of the service's process, and what is done about one that died or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from torch.distributed import HashStore

from rlcore.config import Config
from rlcore.deadlines import SERVICE_ANSWER_S
from rlcore.errors import ConfigError, DeadlineExceeded, RunFailed
from rlcore.launch.service import client as client_module
from rlcore.launch.service import process
from rlcore.launch.service.client import ServiceClient
from rlcore.launch.service.engine_handles import RemoteEngineHandle, RemoteParticipants
from rlcore.launch.service.host import EngineInfo
from rlcore.launch.service.process import ServiceLost
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.weight_publisher import WeightPublisher
from rollout.asyncio_utils import LoopThread
from rollout.weight_sync.publication import WeightPublication

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
    monkeypatch.setattr(process, "MODULE", "tests.unit.launch.service.answering_child")
    client = ServiceClient(make_config())
    opened: Any = client.open(make_config(), greedy_baseline=True)
    assert opened == OPENED
    yield client
    client.close()
    assert client.pid is None or not psutil.pid_exists(client.pid)


def test_calls_are_answered_in_any_order(
    client: ServiceClient, capsys: pytest.CaptureFixture[str]
) -> None:
    late = client._process.call("late")
    array = np.arange(100_000)
    [found] = client.call("echo", array)
    assert np.array_equal(found, array)
    assert late.result(60) == "late"
    assert asyncio.run(client.call_async("echo", 1)) == (1,)
    assert capsys.readouterr().out.splitlines()[0] == r"heard\x1b[2J"


def test_an_error_of_the_service_is_raised_as_it_was(client: ServiceClient) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.filters: no such filter"):
        client.call("raise")


def test_no_answer_is_waited_for_without_end(client: ServiceClient) -> None:
    client.config.cluster.heartbeat_timeout_s = 0.01
    with pytest.raises(DeadlineExceeded, match=r"service: late: no answer within 0\.02 s \(a\.b\)"):
        client.call("late", limit_s=0.01, key="a.b")


@pytest.mark.parametrize("end", ["die", "nonsense", "kill", "hang"])
def test_what_is_asked_of_a_process_that_is_gone_fails_and_another_takes_its_place(
    client: ServiceClient, end: str
) -> None:
    waiting = client._process.call("late")
    before = client.pid
    assert before is not None
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
    for module in (client_module, process):
        monkeypatch.setattr(module, "END_RANK_S", 0.1)
    assert client.pid is not None
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
    client.remember("published", 1, 2, 0)
    client.remember("keep_ledger", Path("ledger.jsonl"))
    client.remember("restore", {})
    client.reopen()
    start_s = client.config.cluster.start_timeout_s
    assert start_s > SERVICE_ANSWER_S
    assert list(asked.items()) == [
        ("restore", start_s),
        ("keep_ledger", start_s),
        ("published", SERVICE_ANSWER_S),
    ]


def test_a_publication_to_engines_that_take_turns_says_that_the_service_is_lost(
    client: ServiceClient, tmp_path: Path
) -> None:
    """Only a loss makes a launcher restart the ranks; an error of a rank does not."""
    client.config = config = make_config(rollout={"engine": {"colocated": True}})
    with pytest.raises(ServiceLost):
        client.call("die")
    thread = LoopThread("publication")
    backend: Any = type("Backend", (), {"buckets": lambda self: ()})()
    publisher = WeightPublisher(
        backend,
        RankSync(HashStore(), 0, 1, timeout_s=5),
        sink=WeightPublication(config, RemoteParticipants(client), thread.loop),
        journal=VersionJournal(tmp_path / "versions.jsonl"),
        timeout_s=5,
    )
    with pytest.raises(
        ServiceLost, match="the knowledge of what its engines keep on the trainer's GPUs"
    ):
        publisher.publish(1)
    thread.close()


# --- engines --------------------------------------------------------------------------------------


def test_an_engine_that_is_no_candidate_any_more_is_in_no_group() -> None:
    """So the group that rank 0 has with it is closed."""
    answers = [["a", "b"], ["a"], ["a"]]

    class Client:
        async def call_async(self, part: str, method: str) -> list[EngineInfo]:
            return [
                EngineInfo(name, False, ("distributed",), f"http://{name}:1", 1, f"group-{name}")
                for name in answers.pop(0)
            ]

    async def main() -> None:
        participants = RemoteParticipants(Client())  # type: ignore[arg-type]
        a, b = await participants.candidates()
        await participants.stale()
        assert (a.in_group, b.in_group) == ("group-a", "group-b")  # type: ignore[attr-defined]
        await participants.candidates()
        assert (a.in_group, b.in_group) == ("group-a", None)  # type: ignore[attr-defined]

    asyncio.run(main())


def test_an_engine_joins_a_group_at_its_address_with_its_rank() -> None:
    asked: list[tuple[Any, ...]] = []

    class Handle(RemoteEngineHandle):
        def __init__(self) -> None:
            self.in_group = None

        async def call(self, *given: Any) -> None:
            asked.append(given)

    handle = Handle()
    address: Any = type("Address", (), {"name": "weights-1"})()
    asyncio.run(handle.join_group(address, 3))
    assert asked == [("join_group", address, 3)]
    assert handle.in_group == "weights-1"
