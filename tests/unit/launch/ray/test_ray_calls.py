"""Calls of actors without a cluster: whose error it is, who hangs, and when a run has ended."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rlcore.deadlines import STALL_S
from rlcore.errors import DeadlineExceeded, RunFailed
from rlcore.launch.ray import calls, status
from rlcore.launch.ray.calls import BEAT_S, HangDetector, translate_error
from rlcore.launch.service.engine_handles import RemoteEngineHandle

LIMIT_S = 5.0


def test_an_error_of_ours_is_raised_as_it_was() -> None:
    ours = RunFailed("the disk is full")
    assert translate_error(RayTaskError("write", "...", ours), "rank 3") is ours
    other = translate_error(RayTaskError("write", "...", KeyError("x")), "rank 3")
    assert isinstance(other, RunFailed)
    assert str(other) == "rank 3: KeyError: 'x'"


class FakeRay:
    """A clock, and an actor that answers as long as `answers` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.answers = True
        self.asked = 0
        self.killed: list[Any] = []
        self.beat = SimpleNamespace(remote=self._ask)
        monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(calls, "ray", self)

    def _ask(self) -> object:
        self.asked += 1
        return object()

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0, "it never waits"
        return (refs, []) if self.answers else ([], refs)

    def get(self, ref: Any) -> None:
        pass

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        assert not no_restart
        self.killed.append(actor)


def checked(detector: HangDetector, fake: FakeRay, seconds: int) -> list[float]:
    """Check every second; the silences that ended the actor."""
    found = []
    for _ in range(seconds):
        fake.now += 1.0
        if (silent := detector.check()) is not None:
            found.append(silent)
    return found


def test_an_actor_that_goes_silent_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    detector = HangDetector(fake, limit_s=LIMIT_S)
    assert checked(detector, fake, 20) == []
    assert fake.asked > 5
    fake.answers = False
    (silent,) = checked(detector, fake, 20)
    assert LIMIT_S <= silent <= LIMIT_S + 2 * BEAT_S
    assert fake.killed == [fake]


def test_it_is_asked_again_after_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    detector = HangDetector(fake, limit_s=LIMIT_S)
    for seconds, asked in ((0.5 * BEAT_S, 0), (0.5 * BEAT_S, 1)):
        fake.now += seconds
        detector.check()
        assert fake.asked == asked


def test_an_actor_that_was_never_up_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    fake.answers = False
    assert checked(HangDetector(fake, limit_s=LIMIT_S), fake, 60) == []


def test_time_in_which_nobody_looked_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    detector = HangDetector(fake, limit_s=LIMIT_S)
    checked(detector, fake, 3)
    fake.answers = False
    checked(detector, fake, 1)
    fake.now += STALL_S + LIMIT_S  # this process was stopped
    assert detector.check() is None
    assert fake.killed == []


def test_stop_waits_until_the_run_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [["b", "a"], ["b", "a"], ["b"]]
    actor = SimpleNamespace(stop=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(status, "_connected", lambda address: nullcontext())
    monkeypatch.setattr(status, "get", lambda ref, **given: None)
    monkeypatch.setattr(status, "POLL_S", 0.0)
    monkeypatch.setattr(status.ray, "get_actor", lambda name, namespace: actor)
    monkeypatch.setattr(status, "_runs", lambda: left.pop(0))
    assert status.stop("a", None, timeout_s=60).startswith("run a has ended")
    assert left == []
    monkeypatch.setattr(status, "_runs", lambda: ["a"])
    with pytest.raises(DeadlineExceeded, match="run a was asked to stop and goes on after 0 s"):
        status.stop("a", None, timeout_s=0.0)


def test_an_engine_joins_a_group_at_its_address_with_its_rank() -> None:
    asked: list[tuple[Any, ...]] = []

    class Handle(RemoteEngineHandle):
        def __init__(self) -> None:
            self.in_group = None

        async def call(self, *given: Any) -> None:
            asked.append(given)

    handle = Handle()
    address: Any = SimpleNamespace(name="weights-1")
    asyncio.run(handle.join_group(address, 3))
    assert asked == [("join_group", address, 3)]
    assert handle.in_group == "weights-1"


def test_a_run_status_keeps_the_newest_facts_in_whatever_order_they_come() -> None:
    async def main() -> None:
        run_status = status.RunStatus()
        await run_status.write(2, {"ranks": [0, 1]})
        await run_status.write(1, {"ranks": []})
        assert await run_status.read() == {"ranks": [0, 1]}
        await run_status.write(3, {"ranks": []})
        assert await run_status.read() == {"ranks": []}

    asyncio.run(main())
