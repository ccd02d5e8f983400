"""A real SGLang server for tests."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import psutil

from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rollout.asyncio_utils import LoopThread
from rollout.engines.child_process import members
from rollout.engines.factories import Keys
from rollout.engines.sglang.external import ExternalServer
from rollout.engines.sglang.server_process import ManagedServer

T = TypeVar("T")


class Running(Protocol):
    """A future, of asyncio or of a thread."""

    def done(self) -> bool: ...


R = TypeVar("R", bound=Running)
# 22 s on a quiet machine with two cores, minutes on a busy one; pytest gives a test 600
START_S = 400.0
SETTINGS: dict[str, Any] = {
    "kind": "sglang",
    "device": "cpu",
    "dtype": "fp32",
    "threads": 1,
    "start_timeout_s": START_S,
    "request_timeout_s": 120.0,
    "update_timeout_s": 60.0,
}


@dataclasses.dataclass(frozen=True)
class Served:
    """A running managed server, with a loop of its own."""

    server: ManagedServer
    url: str
    loop: LoopThread

    @property
    def config(self) -> EngineConfig:
        return self.server.config

    @property
    def keys(self) -> Keys:
        return self.server.keys

    @property
    def model(self) -> Path:
        return Path(self.server.model_path)

    def external(self, **changes: Any) -> ExternalServer:
        """The same server as an external one: `start` connects, `stop` and `kill` do nothing."""
        config = self.config.model_copy(update={"urls": [self.url], **changes})
        return ExternalServer("engine-0", self.url, str(self.model), config=config, keys=self.keys)

    async def until_used(self, tokens: int, work: Running | None = None) -> bool:
        """Wait until running requests hold so many tokens in the cache (updated every 15 steps).

        Returns False where `work` ends before that was seen.
        """
        seconds = 60.0
        deadline = time.monotonic() + seconds
        headers = {"Authorization": f"Bearer {self.keys.api}"}
        async with aiohttp.ClientSession(self.url, headers=headers) as session:
            while work is None or not work.done():
                async with session.get("/v1/loads?include=core") as answer:
                    used = (await answer.json())["loads"][0]["num_used_tokens"]
                if used >= tokens:
                    return True
                assert time.monotonic() < deadline, (
                    f"{used} tokens in use after {seconds:g} s, not {tokens}"
                )
                await asyncio.sleep(0.01)
        return False

    async def started(self, start: Callable[[], R], tokens: int) -> R:
        """Start requests and wait until they hold so many tokens.

        They start again where they were over before we looked: requests of tests take less than a
        second, and a machine stands still for longer.
        """
        for _ in range(20):
            work = start()
            if await self.until_used(tokens, work):
                return work
        raise AssertionError(
            f"requests were over 20 times before they were seen at {tokens} tokens"
        )

    async def ended(self, work: Awaitable[T]) -> T:
        """Wait in the loop for what was started there."""
        return await work

    def call(self, work: Coroutine[Any, Any, T], seconds: float = 120.0) -> T:
        return self.loop.call(work, seconds=seconds, what="a test")


def managed(
    model: Path,
    log: Path,
    *,
    server: dict[str, Any] | None = None,
    tls: TLSConfig | None = None,
    **changes: Any,
) -> ManagedServer:
    config = EngineConfig(**SETTINGS | {"server": server or {}} | changes)
    return ManagedServer(
        log.stem,
        str(model),
        config=config,
        dtype="fp32",
        tokenizer=None,
        log=log,
        keys=Keys.from_environment(),
        tls=tls,
    )


def launch(server: ManagedServer) -> Served:
    """Start it. Close with `close`."""
    loop = LoopThread(f"loop of {server.name}")
    try:
        return Served(
            server, loop.call(server.start(), seconds=START_S, what="starting SGLang"), loop
        )
    except BaseException:
        loop.close()
        raise


def close(served: Served) -> None:
    served.call(served.server.stop(), 30)
    served.loop.close()


@contextmanager
def serving(model: Path, log: Path, **settings: Any) -> Iterator[Served]:
    """A server that is `managed` so, while open."""
    served = launch(managed(model, log, **settings))
    try:
        yield served
    finally:
        close(served)


def gone(group: int, seconds: float = 60.0) -> bool:
    """Whether all processes of a server end soon."""
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return members(group) == []


def appeared(group: int, name: str, seconds: float = START_S) -> int:
    """The process of the group that carries the name."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for pid in members(group):
            with suppress(psutil.NoSuchProcess, IndexError):
                if any(name in word for word in psutil.Process(pid).cmdline()):
                    return pid
        time.sleep(0.05)
    raise AssertionError(f"no {name} within {seconds:g} s")
