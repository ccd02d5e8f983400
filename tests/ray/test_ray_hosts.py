"""Starts and ends of an engine on a cluster: its actor and the service's view, as objects."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rlcore.errors import DeadlineExceeded
from rlcore.launch.ray import engine_hosts
from rlcore.launch.ray.engine_hosts import EngineHost, HostedServer
from rollout.engines.child_process import ChildServer, members
from rollout.engines.factories import Keys
from rollout.weight_sync.process_group import NODE
from tests.configs import small_config

LOADS = """
import os, sys, time
fd = int(sys.stdin.read())
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os.write(fd, b'{"port": %d}\\n' % os.getpid())
time.sleep(600)
"""


class Loading(ChildServer):
    """A server whose process runs long before it answers: it loads until it is allowed to be ready.
    Its port is its pid.
    """

    def __init__(self, folder: Path) -> None:
        self.may_be_ready = folder / "ready"
        self.pids: list[int] = []
        super().__init__("e", folder / "log")
        self.ends_slowly = False  # what is left of its last life, before the next begins

    async def start(self) -> str:
        await self.kill()
        if self.ends_slowly:
            await asyncio.sleep(0.1)
        command = [sys.executable, "-c", LOADS, str(self.may_be_ready)]
        port = await self.launch(command, self._told, timeout_s=60, environment=os.environ)
        return f"http://here:{port}"

    def _told(self, ready_fd: int) -> bytes:
        assert self.pid is not None
        self.pids.append(self.pid)
        return str(ready_fd).encode()

    @property
    def left(self) -> list[int]:
        return [pid for pid in self.pids if members(pid)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loading:
    """Replaces the server of every `EngineHost`, and its node."""
    loading = Loading(tmp_path)
    node = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(engine_hosts.ray, "get_runtime_context", lambda: node)
    monkeypatch.setenv(NODE, "")
    monkeypatch.setattr(engine_hosts, "_server", lambda *arguments: loading)
    return loading


async def until(reached: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not reached():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), 60)


def on_host(use: Callable[[EngineHost], Awaitable[None]]) -> None:
    async def main() -> None:
        host = EngineHost(os.getcwd(), small_config(), 0, Keys("api", "admin"))
        try:
            await use(host)
        finally:
            await host.kill()

    asyncio.run(main())


@pytest.mark.parametrize("ends_slowly", [False, True])
def test_a_start_during_a_start_waits_for_it(server: Loading, ends_slowly: bool) -> None:
    """The service that had it started is gone by then; nobody hears the answer to its call."""

    async def use(host: EngineHost) -> None:
        server.ends_slowly = ends_slowly
        unheard = asyncio.ensure_future(host.start())
        await until(lambda: ends_slowly or bool(server.pids))
        coming = asyncio.ensure_future(host.start())
        await asyncio.sleep(0.3)
        assert not coming.done(), "it does not answer yet"
        server.may_be_ready.touch()
        url = await asyncio.wait_for(coming, 60)
        assert [url] == [f"http://here:{pid}" for pid in server.pids], (
            "one server, and it is that one's address"
        )
        assert url == await unheard == await host.start()

    on_host(use)


def test_a_server_that_ended_is_started_anew_at_a_new_address(server: Loading) -> None:
    async def use(host: EngineHost) -> None:
        server.may_be_ready.touch()
        first = await host.start()
        await host.kill()
        server.may_be_ready.unlink()
        coming, other = (asyncio.ensure_future(host.start()) for _ in range(2))
        await until(lambda: len(server.pids) == 2)
        server.may_be_ready.touch()
        assert first != await coming == await other

    on_host(use)


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("ends_slowly", [False, True])
def test_a_start_that_is_given_up_leaves_no_server(
    server: Loading, how: str, ends_slowly: bool
) -> None:
    async def use(host: EngineHost) -> None:
        server.ends_slowly = ends_slowly
        starting = asyncio.ensure_future(host.start())
        await until(lambda: ends_slowly or bool(server.pids))
        await asyncio.sleep(0.01)
        await getattr(host, how)()
        await asyncio.wait({starting}, timeout=20)
        assert starting.done()
        assert server.left == []
        server.may_be_ready.touch()
        assert await host.start() == f"http://here:{server.pids[-1]}"
        assert server.left == server.pids[-1:]

    on_host(use)


# --- the same, as the service sees it -------------------------------------------------------------


class Handle:
    """The handle of an actor around `host`; to stop waiting for an answer ends no call."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.there = True
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> Any:
        def remote() -> Awaitable[Any]:
            self.asked.append(method)
            return asyncio.shield(asyncio.ensure_future(self._answer(method)))

        return SimpleNamespace(remote=remote)

    async def _answer(self, method: str) -> Any:
        if not self.there:
            raise RayActorError
        return await getattr(self._host, method)()


def hosted(host: Any, placement_timeout_s: float = 20.0) -> tuple[HostedServer, Handle]:
    handle = Handle(host)
    return HostedServer(handle, "e", placement_timeout_s=placement_timeout_s), handle


def test_a_server_that_is_still_starting_is_ended_when_it_is_given_up(server: Loading) -> None:
    async def use(host: EngineHost) -> None:
        one, _ = hosted(host)
        starting = asyncio.ensure_future(one.start())
        await until(lambda: bool(server.pids))
        starting.cancel()
        await one.kill()
        assert server.left == []
        server.may_be_ready.touch()
        assert await one.start() == f"http://here:{server.pids[1]}"
        assert one.ended is not None
        assert not one.ended.done()

    on_host(use)


def test_where_the_cluster_has_no_place_it_is_said_and_nobody_is_ended(server: Loading) -> None:
    async def use(host: EngineHost) -> None:
        one, handle = hosted(host, placement_timeout_s=0.3)
        handle.there = False
        with pytest.raises(
            DeadlineExceeded,
            match=r"engine e has no process after 0\.3 s \(cluster\.start_timeout_s\)",
        ):
            await one.start()
        await one.kill()
        assert set(handle.asked) == {"pid"}

    on_host(use)
