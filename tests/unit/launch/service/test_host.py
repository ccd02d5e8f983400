"""The service's process answers the calls of a publication on the loop that has the engines."""

from __future__ import annotations

import asyncio
import logging.handlers
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.config import Config
from rlcore.errors import PublicationFailed, RunFailed
from rlcore.interfaces import Orders, RankAddress
from rlcore.launch.service import frames
from rlcore.launch.service import host as host_module
from rlcore.launch.service.frames import Begin
from rlcore.launch.service.host import ServiceHost
from rollout.asyncio_utils import LoopThread


class Publication:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    async def open(self, buckets: Any, ranks: Any, only_stale: bool) -> Orders:
        assert asyncio.get_running_loop() is self.loop
        return Orders("distributed", {0: list(ranks)}, joins=True)

    async def send(self, index: int, packed: Any) -> None:
        raise PublicationFailed(f"bucket {index} was not taken")


def test_a_publication_runs_beside_the_engines() -> None:
    config = Config.model_validate(
        {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"paths": ["d"]},
         "training": {"steps": 1}}
    )  # fmt: skip
    thread = LoopThread("rollout")
    host = ServiceHost(Begin(config, False, False, [], "."), logging.handlers.MemoryHandler(1))
    service: Any = SimpleNamespace(publication=Publication(thread.loop), loop=thread.loop)
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
    thread.close()


def test_the_publication_of_the_last_step_is_in_the_timeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No rollouts come behind it, with which it would be written."""
    config = Config.model_validate(
        {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"paths": ["d"]},
         "training": {"steps": 1}}
    )  # fmt: skip
    flushed: list[int] = []
    monkeypatch.setattr(host_module.RECORDER, "flush", flushed.append)
    host = ServiceHost(Begin(config, False, False, [], "."), logging.handlers.MemoryHandler(1))
    service: Any = SimpleNamespace(published=lambda *_: None)
    host._service = service
    asyncio.run(host.source("published", 4, 5, 0))
    assert flushed == [4]
