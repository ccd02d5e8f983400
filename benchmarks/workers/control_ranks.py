"""Ranks of control.py: `run_rank` of a run in threads of this process, with no model.

    python benchmarks/workers/control_ranks.py FOLDER FIRST END

Real are the loop, `RankSync` over a TCPStore, heartbeats, rank 0's parts, the rollout service and
the orders of publications. The backend computes nothing and the senders send nothing. Where a
backend's call is collective, the ranks wait for each other by a store of their own, whose requests
do not count.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.publish_scale import MODELS, buckets_of
from rlcore.algorithms import Moments
from rlcore.config import Config
from rlcore.config.load import load_config
from rlcore.data.batch import RolloutBatch, UpdateResult
from rlcore.data.packing.plan import PlanRules
from rlcore.interfaces import RankAddress
from rlcore.launch import compose, rank
from rlcore.launch.heartbeat import Heartbeat, HeartbeatMonitor
from rlcore.launch.process import Process
from rlcore.launch.service.client import begin_service
from rlcore.planning.shape import CostModel
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import SenderRanks
from rlcore.weights import Bucket
from rollout.weight_sync import choose
from tests.counted_store import CountedStore
from tests.empty_groups import EmptySender

LIMIT_S = 600.0
PINGS = 12
# Before a ping the ranks have waited so long that they look as seldom as they ever do.
LONG_S = 0.6
SHORT_S = 0.02


class Collectives:
    """The ranks wait for each other, without polling."""

    def __init__(self, store: dist.Store, world: int) -> None:
        self._store = store
        self._world = world
        self._number = 0

    def __call__(self) -> None:
        self._number += 1
        if self._store.add(f"{self._number}/came", 1) == self._world:
            self._store.set(f"{self._number}/all", "")
        self._store.wait([f"{self._number}/all"], timedelta(seconds=LIMIT_S))


class EmptyBackend:
    """Implements `PolicyBackend` without a model."""

    base = None
    data_parallel_size = 2
    vocab_size = 0

    def __init__(self, number: int, settings: Mapping[str, Any], together: Collectives) -> None:
        self.rank = number
        self.world_size = settings["world"]
        self.together = together
        self.at_update: list[dict[str, Any]] = []
        self.look: Callable[[], dict[str, Any]] = dict
        self._buckets: tuple[Bucket, ...] = settings["buckets"]
        self._batch: RolloutBatch | None = None

    @property
    def plan_rules(self) -> PlanRules:
        return PlanRules(self.data_parallel_size, 4096, CostModel(1.0, 0.0))

    def load_batch(self, batch: RolloutBatch | None, plans: Any) -> None:
        self._batch = batch
        self.together()

    def score(self, model: str, *, entropy: bool = False) -> dict[str, Tensor] | None:
        if self._batch is None:
            return None
        return {"logprobs": self._batch.vectors["rollout_logprobs"].clone()}

    def assign(self, vectors: Mapping[str, Tensor] | None) -> None:
        self.together()

    def update(self, minibatch: int, *, train_policy: bool = True) -> UpdateResult:
        self.together()
        self.at_update.append({"at": time.monotonic(), **self.look()})
        return UpdateResult({}, Moments())

    def step_distance(self) -> Moments:
        return Moments()

    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets

    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, Tensor | None]]:
        for bucket in self._buckets:
            shown = everywhere or self.rank == 0
            flat = torch.zeros(1, dtype=torch.uint8).expand(bucket.num_bytes) if shown else None
            yield bucket, flat

    def save(self, folder: Path) -> None:
        self.together()

    def describe(self) -> dict[str, str]:
        return {}

    def close(self) -> None: ...


class Ranks:
    """The ranks of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = json.loads((folder / "settings.json").read_text())
        self.settings["buckets"] = model_buckets(self.settings)
        self.loaded = load_config([folder / "run.yaml"])
        self.local = threading.local()

    def connect(self, port: int) -> dist.TCPStore:
        limit = timedelta(seconds=LIMIT_S)
        return dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)

    def backend(self, *given: Any, **options: Any) -> EmptyBackend:
        backend: EmptyBackend = self.local.backend
        return backend

    def run(self, number: int, service: Any) -> None:
        world = self.settings["world"]
        store = CountedStore(dist.PrefixStore("run", self.connect(self.settings["store"])))
        # Connections are made before anything is measured: one holds the interpreter's lock.
        beats = dist.PrefixStore("run", self.connect(self.settings["store"]))
        together = Collectives(self.connect(self.settings["collectives"]), world)
        self.local.backend = backend = EmptyBackend(number, self.settings, together)
        sync = RankSync(store, number, world, timeout_s=LIMIT_S)  # type: ignore[arg-type]
        pings = [*self.pings(sync, together, LONG_S), *self.pings(sync, together, SHORT_S)]
        cluster = self.loaded.config.cluster
        monitor = HeartbeatMonitor(beats, [0] if number else range(1, world), cluster)
        heartbeat = Heartbeat(beats, sync, monitor, [])
        log: Any = SimpleNamespace(open=lambda folder: None)
        process = Process(torch.device("cpu"), sync, log, heartbeat=heartbeat)
        backend.look = lambda: {**store.count, **(processes(service) if service else {})}
        rank.run_rank(
            process, self.loaded, resume=False, overwrite=False, is_checked=True, service=service
        )
        heartbeat.stop(clean=True)
        together()
        found = {"pings": pings, "updates": backend.at_update}
        (self.folder / f"rank_{number}.json").write_text(json.dumps(found))

    def pings(self, sync: RankSync, together: Collectives, wait_s: float) -> list[float]:
        """Seconds from the end of rank 0's work to this rank's return from a broadcast."""
        seconds = []

        def work() -> str:
            time.sleep(wait_s)
            return str(time.monotonic())

        for _ in range(PINGS):
            together()
            sent = float(sync.broadcast("a ping", work))
            seconds.append(time.monotonic() - sent)
        return seconds


def model_buckets(settings: Mapping[str, Any]) -> tuple[Bucket, ...]:
    family, values, _, _ = MODELS[settings["model"]]
    return buckets_of(family, values | settings["smaller"], settings["bucket_bytes"])


def processes(service: Any) -> dict[str, float]:
    """Memory and CPU seconds of rank 0 and the rollout service."""
    found: dict[str, float] = {}
    for name, process in (("rank0", psutil.Process()), ("service", psutil.Process(service.pid))):
        times = process.cpu_times()
        found[f"{name}_bytes"] = process.memory_info().rss
        found[f"{name}_cpu_s"] = times.user + times.system
    return found


def timed(owner: type, name: str, seconds: dict[str, list[float]]) -> Any:
    """Patch a method so that its seconds are noted."""
    method = getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        began = time.monotonic()
        found = method(*given, **options)
        seconds.setdefault(name, []).append(time.monotonic() - began)
        return found

    return mock.patch.object(owner, name, call)


def patches(ranks: Ranks, *, is_rank0: bool, seconds: dict[str, list[float]]) -> list[Any]:
    """What replaces the parts of a run that need a model, GPUs, or a process for each rank."""

    def address(host: str) -> RankAddress:
        """Of a rank of this machine with a GPU of its own."""
        return RankAddress(host, str(uuid.uuid4()))

    def sender(name: str, config: Config, device: torch.device) -> EmptySender:
        return EmptySender(device, LIMIT_S)

    def no_timeline(*given: Any) -> Callable[[], None]:
        return lambda: None

    found = [
        mock.patch.object(rank, "build_backend", ranks.backend),
        mock.patch.object(choose, "make_sender", sender),
        mock.patch.object(compose, "RankAddress", address),
    ]
    if is_rank0:
        return [*found, *(timed(SenderRanks, name, seconds) for name in ("order", "open", "join"))]
    # A process has one timeline.
    return [*found, mock.patch.object(rank, "record_timeline", no_timeline)]


def main() -> None:
    folder = Path(sys.argv[1])
    numbers = range(int(sys.argv[2]), int(sys.argv[3]))
    torch.set_num_threads(1)
    ranks = Ranks(folder)
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for patch in patches(ranks, is_rank0=0 in numbers, seconds=seconds):
            stack.enter_context(patch)
        service = begin_service(ranks.loaded.config, stack) if 0 in numbers else None
        with ThreadPoolExecutor(len(numbers)) as threads:
            for ended in [threads.submit(ranks.run, number, service) for number in numbers]:
                ended.result()
    if 0 in numbers:
        (folder / "opening.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
