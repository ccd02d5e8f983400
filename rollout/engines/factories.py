"""From `rollout.engine.kind` to the engines of a run: the facts and the factory of a kind.

The table of kinds is `KINDS` in `rlcore/config/engine_registry.py`, since a configuration is
checked without importing an engine. For an engine of another package, named by its import path, one
class is both: it has the facts in its attribute `kind`, and the class method `build`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from rlcore.config import Config
from rlcore.config.engine_registry import KINDS, EngineKind
from rlcore.errors import UserError
from rlcore.interfaces import RolloutEngine
from rollout.engines.child_process import Server
from rollout.plugins import load_object

KEY = "rollout.engine.kind"
API_KEY = "RLCORE_ENGINE_API_KEY"
ADMIN_KEY = "RLCORE_ENGINE_ADMIN_KEY"
MIN_KEY_LENGTH = 16  # characters


@dataclass(frozen=True)
class Keys:
    """The keys of servers, which never appear in a configuration, log or command line.

    `api` opens `/generate` and the reading routes; `admin` opens the routes that control a server.
    """

    api: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def new(cls) -> Keys:
        """Make new random keys."""
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32))

    @classmethod
    def from_environment(cls) -> Keys:
        """Read the keys from `RLCORE_ENGINE_API_KEY` and `RLCORE_ENGINE_ADMIN_KEY`.

        A key that is not set is generated.

        Raises:
            UserError: a key is short enough to be guessed, or both are the same.
        """
        found = {name: os.environ.get(name) or "" for name in (API_KEY, ADMIN_KEY)}
        for name, key in found.items():
            if 0 < len(key) < MIN_KEY_LENGTH:
                raise UserError(
                    f"{name} has {len(key)} characters, expected at least {MIN_KEY_LENGTH}: take"
                    " the output of `openssl rand -hex 32`"
                )
        if found[API_KEY] and found[API_KEY] == found[ADMIN_KEY]:
            raise UserError(
                f"{API_KEY} and {ADMIN_KEY} are the same: whoever may generate could replace the"
                " weights too; take another `openssl rand -hex 32` for the second"
            )
        return cls(*(key or secrets.token_urlsafe(32) for key in found.values()))


@dataclass(frozen=True)
class EngineNode:
    """This machine's part in an engine whose tensor-parallel ranks are on several machines.

    Attributes:
        nodes: the number of machines, each with the same number of ranks.
        rank: 0 for the machine that answers requests.
        head: host:port on that machine, the rendezvous of all ranks.
    """

    nodes: int
    rank: int
    head: str


@dataclass(frozen=True)
class EngineSite:
    """Where the engines of a run are built, and for which configuration.

    Attributes:
        local_ranks: the number of trainer processes on this machine, which use its first GPUs.
        logs: the folder for the engines' logs.
        assign_gpus: returns the names of each engine's GPUs, as CUDA_VISIBLE_DEVICES takes them;
            no names for engines on the CPU. Raises ConfigError if there are too few GPUs.
        node: this machine's part in an engine on several machines.
    """

    config: Config
    local_ranks: int
    logs: Path
    assign_gpus: Callable[[], list[list[str]]]
    node: EngineNode | None = None


class EngineFactory(Protocol):
    """Builds the engines of a run."""

    def build(self, site: EngineSite) -> Sequence[RolloutEngine]:
        """Return the engines of the run, built and not started; usually a class method.

        Raises ConfigError for options that these engines do not support.
        """


class HostedFactory(EngineFactory, Protocol):
    """Builds engines whose server processes a launcher can also start on other machines.

    A kind that can be given by URL also has `build_external(config, name, url)`.
    """

    def build_server(
        self, config: Config, index: int, *, logs: Path, gpus: Sequence[str], keys: Keys
    ) -> Server:
        """Return the server of engine `index`, not started; without `gpus` it sees all GPUs."""

    def build_clients(
        self, config: Config, servers: Sequence[Server], *, keys: Keys
    ) -> Sequence[RolloutEngine]:
        """Return the engines of these servers."""


def kind_of(name: str) -> EngineKind:
    """The facts about a kind of engine. Raises ConfigError for an unknown name."""
    if name in KINDS:
        return KINDS[name]
    return cast(EngineKind, load_object(name, {}, key=KEY).kind)


def factory_of(name: str) -> Any:
    """The `EngineFactory` of a kind of engine, a `HostedFactory` for this repository's kinds.

    Raises ConfigError for an unknown name.
    """
    return load_object(KINDS[name].factory if name in KINDS else name, {}, key=KEY)


def engine_name(index: int) -> str:
    """The name of an engine that we start."""
    return f"engine-{index}"


def engine_log(logs: Path, index: int) -> Path:
    """The log file of an engine that we start."""
    return logs / f"engine_{index}.log"
