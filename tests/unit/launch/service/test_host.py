"""The rollout service in its process: who is answered meanwhile, and what a hang leaves."""

from __future__ import annotations

import asyncio
import faulthandler
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.errors import PublicationFailed, RunFailed
from rlcore.interfaces import Orders, RankAddress
from rlcore.launch.service import child, frames
from rlcore.launch.service.child import ServiceHost
from rlcore.launch.service.frames import Begin
from rollout.asyncio_utils import LoopThread
from tests.configs import small_config


class Rollouts:
    """A stub of `RolloutService` whose state takes long to encode."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.fleet = SimpleNamespace(engines=[])
        self.handed_over: list[int] = []
        self.may_encode = threading.Event()

    def next_step(self, step: int) -> int:
        self.handed_over.append(step)
        return step

    def snapshot(self) -> dict[str, Any]:
        return {"encoded": self.may_encode.wait(60)}


class Publication:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    async def open(self, buckets: Any, ranks: Any, only_stale: bool) -> Orders:
        assert asyncio.get_running_loop() is self.loop
        return Orders("distributed", {0: list(ranks)}, joins=True)

    async def send(self, index: int, packed: Any) -> None:
        raise PublicationFailed(f"bucket {index} was not taken")


@pytest.fixture
def rollouts() -> Iterator[Rollouts]:
    thread = LoopThread("rollouts")
    yield Rollouts(thread.loop)
    thread.close()


@pytest.fixture
def host(rollouts: Rollouts, tmp_path: Path) -> Iterator[ServiceHost]:
    config = small_config(cluster={"heartbeat_timeout_s": 0.6})
    begin = Begin(config, greedy_baseline=False, again=False, path=(), folder=str(tmp_path))
    made = ServiceHost(begin, None)  # type: ignore[arg-type]
    made._service = rollouts  # type: ignore[assignment]
    yield made
    faulthandler.cancel_dump_traceback_later()


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0.01)


def test_others_are_answered_while_a_hand_over_is_encoded(
    host: ServiceHost, rollouts: Rollouts
) -> None:
    async def main() -> None:
        stepping = asyncio.ensure_future(host.next_step(1))
        await until(lambda: bool(rollouts.handed_over))
        await asyncio.wait_for(host.beat(), 30)
        assert not stepping.done()
        rollouts.may_encode.set()
        assert await stepping == (1, {"encoded": True})

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_process_that_hangs_writes_where_it_stands(
    host: ServiceHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> None:
        time.sleep(1.5)

    path = tmp_path / "service.log"
    with path.open("wb") as log:
        monkeypatch.setattr(child, "STDERR", log.fileno())
        for _ in range(3):
            asyncio.run(host.beat())
            time.sleep(0.01)
        hang()
        faulthandler.cancel_dump_traceback_later()
    assert path.read_text().count(" in hang\n") == 1


def test_a_publication_runs_beside_the_engines(host: ServiceHost, rollouts: Rollouts) -> None:
    service: Any = SimpleNamespace(publication=Publication(rollouts.loop), loop=rollouts.loop)
    host._service = service
    ranks = [RankAddress("here", "GPU-a", "0"), RankAddress("there")]

    async def calls() -> None:
        orders = await host.publication("open", (), ranks, False)
        assert orders == Orders("distributed", {0: ranks}, joins=True)
        parts = frames.encode((1, (True, orders)))
        assert b"GPU-a" in b"".join(bytes(part) for part in parts), "it can be sent"
        with pytest.raises(PublicationFailed, match="bucket 3 was not taken"):
            await host.publication("send", 3, {})
        with pytest.raises(RunFailed, match="knows no call 'nonsense'"):
            await host.publication("nonsense")

    asyncio.run(calls())


def test_the_publication_of_the_last_step_is_in_the_timeline(
    host: ServiceHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rollouts come behind it, with which it would be written."""
    flushed: list[int] = []
    monkeypatch.setattr(child.RECORDER, "flush", flushed.append)
    service: Any = SimpleNamespace(published=lambda *_: None)
    host._service = service
    asyncio.run(host.source("published", 4, 5, 0))
    assert flushed == [4]


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_that_is_not_ours_names_the_line_that_raised() -> None:
    try:
        raise KeyError("nothing")
    except KeyError as error:
        sent = child._sendable(error, "next_step")
    assert isinstance(sent, RunFailed)
    assert re.fullmatch(
        r"the rollout service: next_step: KeyError: 'nothing' \(.*test_host\.py:\d+ in"
        r" test_an_error_that_is_not_ours_names_the_line_that_raised\)",
        str(sent),
    )


def test_our_own_error_is_sent_as_it_is() -> None:
    error = RunFailed("no engine is left")
    assert child._sendable(error, "next_step") is error
