"""`rlcore engine`: runs the SGLang engines of a configuration alone, for a trainer elsewhere."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from rlcore.config import Config
from rlcore.config.sections.rollout import RestartConfig
from rlcore.errors import ConfigError, RlcoreError, RunFailed, UserError
from rlcore.runs.files import write_atomic
from rlcore.terminal import printable
from rollout.fleet.engine_states import pause_before

if TYPE_CHECKING:
    from rollout.engines.factories import EngineNode
    from rollout.engines.sglang.server_process import ManagedServer

Follow = Callable[[Sequence[str]], Coroutine[Any, Any, None]]


def node_of(nodes: int, rank: int, head: str | None) -> EngineNode | None:
    """Return this machine's part of an engine on `nodes` machines; None for one machine.

    Raises UserError if the three options contradict each other.
    """
    from rollout.engines.factories import EngineNode

    if nodes == 1:
        if rank or head is not None:
            raise UserError("--node-rank and --head are of an engine on several machines: --nodes")
        return None
    if not 0 <= rank < nodes:
        raise UserError(f"--node-rank: got {rank}, expected 0 to {nodes - 1} (--nodes {nodes})")
    host, _, port = (head or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"--head: got {head!r}, expected host:port, an address of the machine of --node-rank"
            " 0, where its ranks connect"
        )
    return EngineNode(nodes, rank, f"{host}:{port}")


def serve_engines(
    config: Config, *, urls_file: Path | None = None, node: EngineNode | None = None
) -> int:
    """Run the engines until SIGINT or SIGTERM; return the exit code, 0.

    Args:
        urls_file: holds a JSON list of the URLs while the engines are ready. A trainer may wait
            for this file.
        node: this machine's part of an engine on several machines. Only the first machine has a
            URL; the lists of the others are empty.

    Raises:
        ConfigError: the configuration has no SGLang engines to start.
        RunFailed: an engine did not start, or no engine is left; all have been ended. The message
            has the last lines of a log.
    """
    from rlcore.launch.engines import engine_site
    from rollout.engines.factories import ADMIN_KEY, API_KEY, Keys, factory_of

    _check(config, urls_file, node)
    keys = Keys.from_environment()
    known = {API_KEY: keys.api, ADMIN_KEY: keys.admin}
    made = {name: key for name, key in known.items() if not os.environ.get(name)}
    # The trainer must be the first to make the run's own folder, so logs lie next to it, in a
    # subfolder of this machine.
    logs = Path(config.run.dir) / f"{config.run.name}-engines" / socket.gethostname()
    if node is not None:
        logs = logs / f"node-{node.rank}"
    kind = config.rollout.engine.kind
    site = engine_site(config, local_ranks=0, logs=logs, node=node)
    servers: Sequence[ManagedServer] = factory_of(kind).build_servers(site, keys)
    print(f"starting {len(servers)} engine{'s' * (len(servers) != 1)}; logs in {logs}", flush=True)
    keys_file = logs / "keys.sh"

    def announce(urls: Sequence[str]) -> None:
        listed = orjson.dumps(list(urls))
        if node is not None and node.rank > 0:
            listed = b"[]"
            lines = [f"ready: machine {node.rank} of the engine at {node.head}"]
        else:
            lines = ["ready. For the trainer:"]
            # The keys go to a private file: other users may be able to read standard output.
            if made:
                exports = "".join(f"export {name}={key}\n" for name, key in made.items())
                logs.mkdir(parents=True, exist_ok=True)
                write_atomic(keys_file, exports.encode(), mode=0o600)
                lines.append(f". {shlex.quote(str(keys_file.absolute()))}")
            given = f"rollout.engine.kind={kind} rollout.engine.urls='{listed.decode()}'"
            lines.append(f"rlcore train ... {given}")
        print(*lines, sep="\n  ", flush=True)
        if urls_file is not None:
            write_atomic(urls_file, listed)

    files = [keys_file] if urls_file is None else [keys_file, urls_file]
    try:
        # Engines that were killed leave their files behind.
        for file in files:
            file.unlink(missing_ok=True)
        restart = config.rollout.engine.restart
        asyncio.run(run_servers(servers, announce, followers(config), restart=restart))
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    return 0


def _check(config: Config, urls_file: Path | None, node: EngineNode | None) -> None:
    from rollout.engines.factories import kind_of

    engine = config.rollout.engine
    nodes = 1 if node is None else node.nodes
    wrong = {
        f"rollout.engine.kind: got {engine.kind!r}, expected 'sglang': other engines are the"
        " trainer's own": not kind_of(engine.kind).standalone,
        "rollout.engine.urls: these engines run already: leave it out to start others": (
            engine.is_external
        ),
        "rollout.engine.colocated: the trainer itself starts engines that share its GPUs: leave it"
        " out": engine.colocated,
        f"--urls-file: there is no folder {urls_file and urls_file.parent}": (
            urls_file is not None and not urls_file.parent.is_dir()
        ),
        f"rollout.engine.count: got {engine.count} with --nodes {nodes}, expected 1: call the"
        " command once for each engine, each with its own --head": nodes > 1 and engine.count > 1,
        f"rollout.engine.tensor_parallel: got {engine.tensor_parallel}, expected a multiple of"
        f" --nodes {nodes}: each machine has as many ranks": engine.tensor_parallel % nodes,
        "rollout.engine.transport: got delta with --nodes, but whole weights are kept on one"
        " machine there: take auto, or disk with a folder that all machines share": (
            nodes > 1 and engine.transport == "delta"
        ),
    }
    for message, holds in wrong.items():
        if holds:
            raise ConfigError(message)


def followers(config: Config) -> list[Follow]:
    """Keep whole weights on this machine if only changes are published; else do nothing."""
    from rollout.weight_sync.choose import shared_folder
    from rollout.weight_sync.delta_follower import keep_following

    engine = config.rollout.engine
    if engine.transport != "delta":
        return []
    if engine.weights_dir is None:
        raise ConfigError(
            "rollout.engine.weights_dir: not given; it is the folder where the trainer writes the"
            " changes that engines follow"
        )
    return [lambda urls: keep_following(shared_folder(config), urls)]


async def run_servers(
    servers: Sequence[ManagedServer],
    announce: Callable[[Sequence[str]], None],
    follow: Sequence[Follow] = (),
    *,
    restart: RestartConfig,
) -> None:
    """Start all servers at once, and restart them as they end, until SIGINT or SIGTERM; then stop.

    Args:
        announce: called with the URLs once all have started.
        follow: tasks next to the servers; the end of a task ends the servers too.
        restart: how often and when a server is restarted. The command runs until no server is left.

    Raises:
        RunFailed: a server did not start the first time, or no server is left.
    """
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    starting = [asyncio.ensure_future(server.start()) for server in servers]
    all_started = asyncio.gather(*starting)
    working: list[asyncio.Future[Any]] = []
    try:
        await asyncio.wait({all_started, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        urls = all_started.result()
        announce(urls)
        keepers = [_keep(server, url, restart) for server, url in zip(servers, urls, strict=True)]
        working = [asyncio.ensure_future(asyncio.gather(*keepers))]
        working += [asyncio.ensure_future(one(urls)) for one in follow]
        await asyncio.wait({stopping, *working}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        if working[0].done():
            raise RunFailed("no engine is left: " + "; ".join(working[0].result()))
        for work in working:
            if work.done():
                work.result()
    finally:
        stopping.cancel()
        # Cancelling a start ends the server.
        for work in (*working, *starting):
            work.cancel()
        await asyncio.gather(*working, *starting, all_started, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in servers))


async def _keep(server: ManagedServer, url: str, restart: RestartConfig) -> str:
    """Restart a server at the same `url` whenever it ends; return its last error."""
    port = urlsplit(url).port or 0
    failed_starts = 0
    why = ""
    restarted_at: list[float] = []
    while True:
        began = time.monotonic()
        if not why:
            if server.ended is not None:
                await asyncio.wait({server.ended})
            why = f"{server.name} ended: {server.describe_end()}"
        now = time.monotonic()
        if now - began > restart.max_backoff_s:
            failed_starts = 0
        restarted_at = [at for at in restarted_at if at > now - restart.window_s]
        if len(restarted_at) >= restart.limit:
            break
        pause_s = pause_before(restart, failed_starts)
        _say(
            f"{why}\n{server.name} is started again in {pause_s:g} s: {len(restarted_at) + 1} of"
            f" {restart.limit} (rollout.engine.restart.limit)"
        )
        await asyncio.sleep(pause_s)
        restarted_at.append(time.monotonic())
        failed_starts += 1
        try:
            await server.start(port)
        except RlcoreError as error:
            # Recovery: the next start, if the limit allows one.
            why = str(error)
        else:
            why = ""
            _say(f"{server.name} runs again at {url}")
    _say(why)
    _say(f"{server.name} is left alone from now on (rollout.engine.restart.limit: {restart.limit})")
    return why


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
