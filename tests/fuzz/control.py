"""Control messages: what ranks read from the run's store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch.distributed import HashStore

from rlcore.config.sections.training import ClusterConfig, RunConfig
from rlcore.errors import RlcoreError, RunFailed
from rlcore.launch.heartbeat import HeartbeatMonitor, beat_key, raise_if_stuck, read_stuck
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


TARGETS = (Target("store", open_store),)
