"""From `rollout.engine.kind` to the engines of a run: the facts and the factory of a kind.

The table of kinds is `KINDS` in `rlcore/config/engine_registry.py`, since a configuration is
checked without importing an engine. To add a kind to this repository:

1. a folder beside this file, with a `rlcore.interfaces.RolloutEngine` and its `HostedFactory`;
2. a row of `KINDS`: its facts (`EngineKind`), which code asks for instead of its name, and the
   import path of its factory;
3. a test that `rollout.engines.testing.check_engine` accepts its engines.

For an engine of another package, named by its import path, one class is both: it has the facts in
its attribute `kind`, and the class method `build`.
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
LEAST_KEY = 16  # characters


@dataclass(frozen=True)
class Keys:
    """The keys of servers, which stand in no configuration, log or command line.

    `api` opens `/generate` and the routes that read; `admin` opens the routes that control.
    """

    api: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def new(cls) -> Keys:
        """Make keys that nobody else has."""
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32))

    @classmethod
    def from_environment(cls) -> Keys:
        """Read the keys from `RLCORE_ENGINE_API_KEY` and `RLCORE_ENGINE_ADMIN_KEY`.

        A key that is not set is generated.

        Raises:
            UserError: one is short enough to be guessed, or both are the same.
        """
        found = {name: os.environ.get(name) or "" for name in (API_KEY, ADMIN_KEY)}
        for name, key in found.items():
            if 0 < len(key) < LEAST_KEY:
                raise UserError(
                    f"{name} has {len(key)} characters, expected at least {LEAST_KEY}: take those"
                    " of `openssl rand -hex 32`"
                )
        if found[API_KEY] and found[API_KEY] == found[ADMIN_KEY]:
            raise UserError(
                f"{API_KEY} and {ADMIN_KEY} are the same: whoever may generate could replace the"
                " weights too; take another `openssl rand -hex 32` for the second"
            )
        return cls(*(key or secrets.token_urlsafe(32) for key in found.values()))


@dataclass(frozen=True)
class EngineNode:
    """This machine, of several that hold the tensor-parallel ranks of one engine.

    Attributes:
        nodes: the number of machines, each with as many ranks.
        rank: 0 for the machine that answers requests.
        head: host:port of an address of that machine, where all ranks meet.
    """

    nodes: int
    rank: int
    head: str


@dataclass(frozen=True)
class EngineSite:
    """Where the engines of a run are built, and for which configuration.

    Attributes:
        local_ranks: the trainer processes on this machine, which have its first GPUs; 0: none.
        logs: the folder for the engines' logs.
        assign_gpus: returns the names of each engine's GPUs, as CUDA_VISIBLE_DEVICES takes them;
            no names where engines are on the CPU. Raises ConfigError where there are too few.
        node: where an engine is on several machines.
    """

    config: Config
    local_ranks: int
    logs: Path
    assign_gpus: Callable[[], list[list[str]]]
    node: EngineNode | None = None


class EngineFactory(Protocol):
    """Builds the engines of a run."""

    def build(self, site: EngineSite) -> Sequence[RolloutEngine]:
        """Return the engines of the run, built and not started; a class method, as a rule.

        Raises ConfigError for what the configuration asks of them in vain.
        """


class HostedFactory(EngineFactory, Protocol):
    """Builds engines whose server processes a launcher starts on other machines, too.

    That of a kind which may be given by URL has `build_external(config, name, url)` as well.
    """

    def build_server(
        self, config: Config, index: int, *, logs: Path, gpus: Sequence[str], keys: Keys
    ) -> Server:
        """Return the server of engine `index`, not started; without `gpus` it sees all of them."""

    def build_clients(
        self, config: Config, servers: Sequence[Server], *, keys: Keys
    ) -> Sequence[RolloutEngine]:
        """Return the engines of these servers."""


def kind_of(name: str) -> EngineKind:
    """The facts about a kind of engine. Raises ConfigError where there is none of that name."""
    if name in KINDS:
        return KINDS[name]
    return cast(EngineKind, load_object(name, {}, key=KEY).kind)


def factory_of(name: str) -> Any:
    """The `EngineFactory` of a kind of engine; of this repository's kinds a `HostedFactory`.

    Raises ConfigError where there is none of that name.
    """
    return load_object(KINDS[name].factory if name in KINDS else name, {}, key=KEY)


def engine_name(index: int) -> str:
    """The name of an engine that we start."""
    return f"engine-{index}"


def engine_log(logs: Path, index: int) -> Path:
    """The file for what an engine that we start prints."""
    return logs / f"engine_{index}.log"
