"""Control messages: what ranks read from the run's store, and what rank 0 asks of the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from rlcore.config.sections.run import RunConfig
from rlcore.config.sections.training import ClusterConfig
from rlcore.errors import RlcoreError, RunFailed
from rlcore.launch.heartbeat import HeartbeatMonitor, beat_key, raise_if_stuck, read_stuck
from rlcore.launch.ray.service_actor import ServiceActor
from rlcore.launch.service.host import EngineInfo
from rlcore.stores import FolderStore
from rlcore.trainer.rank_sync import Failure, RankSync, read_failure
from tests.fuzz.harness import ACCEPTED, Case, Target
from tests.fuzz.mutation import Mutator
from tests.fuzz.oracle import need

FAILURE = Failure(1, "CUDA error: out of memory")


@contextmanager
def open_store() -> Iterator[Case]:
    """A store whose keys of the run hold something else, in both kinds of stores."""

    def read(store: Any, mutator: Mutator) -> str:
        values = {
            "failed": json.dumps(asdict(FAILURE)),
            "stuck": "1",
            "passed/1": "255",
            beat_key(1): "17 a step",
            "interrupt": "1",
            "sync/1": "go",
        }
        chosen = mutator.random.choice([*values])
        changed = mutator.text(values[chosen])  # stores take what UTF-8 can write
        values[chosen] = changed.encode("utf-8", "replace").decode()
        if chosen == "failed" and mutator.random.random() < 0.8:
            values[chosen] = json.dumps(mutator.value(asdict(FAILURE)))
        for key, value in values.items():
            if key not in ("failed", "interrupt") or chosen == key:
                store.set(key, value)
        sync = RankSync(store, 0, 2, timeout_s=1.0)
        sync._count = 256
        sync._tidied = 250  # `sync/1` is read below
        sync._tidy()
        monitor = HeartbeatMonitor(store, [1], ClusterConfig())
        need(all(seconds >= 0 for seconds in monitor.silence().values()), "silence")
        found = monitor.failure(limit_s=-1.0)
        need(found is None or isinstance(found.error, str), f"{found}")
        failure = read_failure(store)
        if failure is not None:
            need(type(failure.rank) is int and isinstance(failure.error, str), f"{failure}")
            need(type(failure.bad_input) is type(failure.waited) is bool, f"{failure}")
            raise_if_stuck(store, failure, RunConfig(name="fuzz"))
            sync.wait_until(lambda: False, "nothing")
        read_stuck(store)
        word = RankSync(store, 1, 2, timeout_s=1.0).broadcast("a word", str)
        need(isinstance(word, str), f"{word!r}")
        return ACCEPTED

    def case(mutator: Mutator) -> str:
        try:
            if mutator.random.random() < 0.3:
                with FolderStore.made() as store:
                    return read(store, mutator)
            return read(HashStore(), mutator)
        except (RunFailed, RlcoreError) as error:
            need(bool(str(error)), "no words")
            return type(error).__name__ if mutator.changed else ACCEPTED

    yield case


# --- Ray ------------------------------------------------------------------------------------------


class Engine:
    """What the actor asks of an engine."""

    name = "engine-0"
    managed = True
    transports = ("distributed",)
    url = "http://127.0.0.1:1"
    group_ranks = 1
    in_group = None

    async def set_version(self, version: int) -> None:
        """See `RolloutEngine.set_version`."""


class Service:
    """What the actor asks of the rollout service; anything else must not be reached."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        engines = [Engine()]
        self.fleet = SimpleNamespace(
            engines=engines, members=[], draining=lambda engine: None, candidates=self._candidates
        )

    async def _candidates(self) -> list[Any]:
        return self.fleet.engines  # type: ignore[no-any-return]

    def published(self, *given: Any) -> None:
        """See `RolloutSource.published`."""

    def snapshot(self) -> dict[str, Any]:
        """See `RolloutSource.snapshot`."""
        return {}


CALLS: tuple[tuple[str, list[Any]], ...] = (
    ("source", ["TOKEN", "published", 1, 1, 0]),
    ("source", ["TOKEN", "snapshot"]),
    ("participants", ["TOKEN", "candidates"]),
    ("notify", ["TOKEN", "draining", "engine-0"]),
    ("engine", ["TOKEN", "engine-0", "set_version", 3]),
)


@contextmanager
def open_actor() -> Iterator[Case]:
    """The service actor, without Ray, called with broken arguments."""
    loop = asyncio.new_event_loop()
    actor = ServiceActor.__new__(ServiceActor)
    actor._instance = "abc"
    actor._token = "abc/0"
    actor._service = Service(loop)  # type: ignore[assignment]
    actor._pending = set()

    async def call(part: str, given: list[Any]) -> Any:
        return await getattr(actor, part)(*given)

    def case(mutator: Mutator) -> str:
        part, example = mutator.random.choice(CALLS)
        given = mutator.value(example)
        arguments = given if isinstance(given, list) else [given]
        right = ["abc/0" if one == "TOKEN" else one for one in arguments]
        if mutator.changed and mutator.random.random() < 0.3:
            right[:1] = [mutator.random.choice(("abc/1", "xyz/0", ""))]
        try:
            found = loop.run_until_complete(asyncio.wait_for(call(part, right), 10))
        except RlcoreError as error:
            return type(error).__name__
        except TypeError as error:
            # too few or too many arguments: Python's own word for it, which Ray passes on
            need("argument" in str(error), f"{error!r}")
            return "TypeError"
        if part == "participants":
            need(all(isinstance(one, EngineInfo) for one in found), f"{found}")
        return ACCEPTED

    yield case
    loop.close()


TARGETS = (Target("store", open_store), Target("ray-calls", open_actor))
