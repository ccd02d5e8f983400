"""Calls of actors without a cluster: whose error it is, and when a run has ended."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from rlcore.errors import DeadlineExceeded, RunFailed
from rlcore.launch.ray import status
from rlcore.launch.ray.calls import translate_error


def test_an_error_of_ours_is_raised_as_it_was() -> None:
    ours = RunFailed("the disk is full")
    assert translate_error(RayTaskError("write", "...", ours), "rank 3") is ours
    other = translate_error(RayTaskError("write", "...", KeyError("x")), "rank 3")
    assert isinstance(other, RunFailed)
    assert str(other) == "rank 3: KeyError: 'x'"


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


def test_a_run_status_keeps_the_newest_facts_in_whatever_order_they_come() -> None:
    async def main() -> None:
        run_status = status.RunStatus()
        await run_status.write(2, {"ranks": [0, 1]})
        await run_status.write(1, {"ranks": []})
        assert await run_status.read() == {"ranks": [0, 1]}
        await run_status.write(3, {"ranks": []})
        assert await run_status.read() == {"ranks": []}

    asyncio.run(main())
