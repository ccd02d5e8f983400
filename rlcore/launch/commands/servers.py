"""Servers that run alone: started together, each started again where it was when it ends, and ended
together.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlcore.config.sections.rollout import RestartConfig
from rlcore.errors import RlcoreError, RunFailed
from rollout.fleet.health import pause_before

if TYPE_CHECKING:
    from rollout.engines.sglang.server_process import ManagedServer

Follow = Callable[[Sequence[str]], Coroutine[Any, Any, None]]


async def run_servers(
    servers: Sequence[ManagedServer],
    announce: Callable[[Sequence[str]], None],
    follow: Follow | None = None,
    *,
    restart: RestartConfig,
) -> None:
    """Start all at once, announce their URLs, and keep them up until SIGINT or SIGTERM; then none
    runs.

    Args:
        follow: runs beside them, told their URLs; nothing goes on without it.
        restart: of each; one that has used them up is left alone while another goes on.

    Raises:
        RunFailed: one did not start the first time, or the last of them cannot be kept up.
    """
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    starting = [asyncio.ensure_future(server.start()) for server in servers]
    all_started = asyncio.gather(*starting)
    beside: list[asyncio.Future[Any]] = []
    try:
        await asyncio.wait({all_started, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        urls = all_started.result()
        announce(urls)
        keepers = [_keep(server, url, restart) for server, url in zip(servers, urls, strict=True)]
        beside = [asyncio.ensure_future(asyncio.gather(*keepers))]
        if follow is not None:
            beside.append(asyncio.ensure_future(follow(urls)))
        await asyncio.wait({stopping, *beside}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        if beside[0].done():
            raise RunFailed("no engine is left: " + "; ".join(beside[0].result()))
        beside[-1].result()
    finally:
        stopping.cancel()
        for work in (*beside, *starting):  # what has begun to start is ended by that
            work.cancel()
        await asyncio.gather(*beside, *starting, all_started, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in servers))


async def _keep(server: ManagedServer, url: str, restart: RestartConfig) -> str:
    """Start it again at `url`, where its users look for it, whenever it ends. Returns what it met
    at last.
    """
    port = urlsplit(url).port or 0
    failed_starts = 0
    why = ""
    for number in range(1, restart.limit + 1):
        began = time.monotonic()
        why = why or await _end(server)
        if time.monotonic() - began > restart.max_backoff_s:
            failed_starts = 0
        pause_s = pause_before(restart, failed_starts)
        _say(why)
        _say(
            f"{server.name} is started again in {pause_s:g} s: {number} of {restart.limit}"
            " (rollout.engine.restart.limit)"
        )
        await asyncio.sleep(pause_s)
        failed_starts += 1
        try:
            await server.start(port)
        except RlcoreError as error:  # recovery: the next start, or it is left alone
            why = str(error)
        else:
            why = ""
            _say(f"{server.name} runs again at {url}")
    why = why or await _end(server)
    _say(why)
    _say(f"{server.name} is left alone from now on (rollout.engine.restart.limit: {restart.limit})")
    return why


async def _end(server: ManagedServer) -> str:
    if server.ended is not None:
        await asyncio.wait({server.ended})
    return f"{server.name} ended: {server.describe_end()}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
