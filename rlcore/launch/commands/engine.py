"""`rlcore engine`: the SGLang engines of a configuration without its trainer, which is told their
URLs.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import orjson

from rlcore.config import Config
from rlcore.errors import ConfigError
from rlcore.launch.commands.servers import Follow, run_servers
from rlcore.runs.files import write_atomic


def serve_engines(config: Config, *, urls_file: Path | None = None) -> int:
    """Run them until SIGINT or SIGTERM. The exit code, 0.

    Args:
        urls_file: holds a JSON list of their URLs while they are ready, for a trainer that waits
            for it.

    Raises:
        ConfigError: the configuration has no SGLang engines for us to start.
        RunFailed: an engine did not start, or none could be kept up; all have been ended. With the
            last lines of a log.
    """
    from rlcore.launch.engines import engine_site
    from rollout.engines.registry import factory_of, kind_of
    from rollout.engines.sglang.keys import ADMIN_KEY, API_KEY, Keys

    engine = config.rollout.engine
    if not kind_of(engine.kind).standalone:
        raise ConfigError(
            f"rollout.engine.kind: got {engine.kind!r}, expected 'sglang': other engines are the"
            " trainer's own"
        )
    if engine.urls:
        raise ConfigError(
            "rollout.engine.urls: these engines run already: leave it out to start others"
        )
    if engine.colocated:
        raise ConfigError(
            "rollout.engine.colocated: the trainer itself starts engines that share its GPUs: leave"
            " it out"
        )
    if urls_file is not None and not urls_file.parent.is_dir():
        raise ConfigError(f"--urls-file: there is no folder {urls_file.parent}")
    follow = follower(config)
    keys = Keys.from_environment()
    generated = {
        name: key
        for name, key in ((API_KEY, keys.api), (ADMIN_KEY, keys.admin))
        if not os.environ.get(name)
    }
    # Beside the run's own folder, which the trainer will want to be the first to make; several
    # machines may share it.
    logs = Path(config.run.dir) / f"{config.run.name}-engines" / socket.gethostname()
    site = engine_site(config, world_size=0, local_ranks=0, logs=logs)
    servers = factory_of(engine.kind).build_servers(site, keys)
    print(f"starting {len(servers)} engine{'s' * (len(servers) != 1)}; logs in {logs}", flush=True)

    def announce(urls: Sequence[str]) -> None:
        exports = [f"export {name}={key}" for name, key in generated.items()]
        told = f"rollout.engine.kind={engine.kind} rollout.engine.urls='{orjson.dumps(list(urls)).decode()}'"
        print(
            "ready. For the trainer:", *exports, f"rlcore train ... {told}", sep="\n  ", flush=True
        )
        if urls_file is not None:
            write_atomic(urls_file, orjson.dumps(list(urls)))

    if urls_file is not None:
        urls_file.unlink(missing_ok=True)  # of engines that were killed
    try:
        asyncio.run(run_servers(servers, announce, follow, restart=engine.restart))
    finally:
        if urls_file is not None:
            urls_file.unlink(missing_ok=True)
    return 0


def follower(config: Config) -> Follow | None:
    """What keeps whole weights on this machine for engines that are published changes alone; None
    for other transports.
    """
    from rollout.weight_sync.choose import shared_folder
    from rollout.weight_sync.follower import keep_following

    engine = config.rollout.engine
    if engine.transport != "delta":
        return None
    if engine.weights_dir is None:
        raise ConfigError(
            "rollout.engine.weights_dir: not given; it is the folder where the trainer writes the"
            " changes that engines follow"
        )
    return lambda urls: keep_following(shared_folder(config), urls)
