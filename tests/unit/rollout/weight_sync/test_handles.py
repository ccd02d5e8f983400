"""Handles from every rank: each engine gets those of its own GPU, and none is left unread.

The ranks are threads over one store, on two nodes; what stands for GPU memory is a table.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rlcore.config import Config
from rlcore.interfaces import RankAddress
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import SenderRanks
from rlcore.trainer.weight_publisher import WeightPublisher
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.asyncio_utils import LoopThread
from rollout.fleet.publication import WeightPublication
from rollout.weight_sync import tensor as serialized
from rollout.weight_sync.tensor import SerializedSender
from tests.one_rank import calls_of
from tests.static_participants import StaticParticipants

RANKS = 4
BUCKETS = cut_buckets([TensorSpec(f"w{i}", (16,), "uint8") for i in range(6)], 16)
GPUS = ["x 5", "x 2", "y 5", "y 0"]  # of the ranks: the node, and its GPU there


class Memory:
    """The memory of all handles: a handle's content until it is freed."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.made = 0
        self.lock = threading.Lock()


class Maker(SerializedSender):
    """Makes handles of a table."""

    def __init__(self, memory: Memory, gpu: str) -> None:
        super().__init__()
        self.memory = memory
        self.gpu = gpu

    def pack(self, bucket: Bucket, flat: torch.Tensor) -> str:
        if not self._by_handle:
            return "bytes"
        with self.memory.lock:
            self.memory.made += 1
            name = json.dumps([self.gpu, bucket.index, self.memory.made])
            self.memory.held[name] = bytes(flat.tolist())
        return json.dumps({"payload": name, "counter": [name, 0]})

    def discard(self, packed: Mapping[int, str], stopped: Sequence[int] | None) -> None:
        """The readers of a handle are counted in the memory of its own node."""
        owners = {json.loads(json.loads(handle)["payload"])[0] for handle in packed.values()}
        assert owners <= {self.gpu}
        super().discard(packed, stopped)


class Broadcast:
    """Lets the ranks have a bucket when rank 0 does, or asks for the one before it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent = 0

    def send(self, upto: int) -> None:
        with self.changed:
            self.sent = upto
            self.changed.notify_all()

    def wait(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.sent > number, timeout=20)


class Backend:
    """Yields buckets in one buffer, which is overwritten, as the exporter's are."""

    base = None

    def __init__(self, rank: int, broadcast: Broadcast) -> None:
        self.rank = rank
        self.broadcast = broadcast
        self.number = 0
        self.everywhere: list[bool] = []

    def buckets(self) -> tuple[Bucket, ...]:
        return BUCKETS

    def export_buckets(
        self, *, everywhere: bool = False
    ) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
        self.everywhere.append(everywhere)
        flat = torch.zeros(16, dtype=torch.uint8)
        for bucket in BUCKETS:
            if self.rank == 0:
                self.broadcast.send(self.number + 2)
            elif everywhere:
                self.broadcast.wait(self.number)
            self.number += 1
            flat.fill_(bucket.index)
            yield bucket, flat if everywhere or self.rank == 0 else None
        flat.fill_(99)


class Engine:
    """An engine on some GPUs. Reading a handle frees its memory.

    Args:
        fails: it does at bucket 2 of the first publication, before it reads.
    """

    transports = ("tensor",)

    def __init__(self, name: str, gpus: Sequence[str], memory: Memory, *, fails: bool) -> None:
        self.name = name
        self.gpus = tuple(gpus)
        self.group_ranks = max(1, len(gpus))
        self.memory = memory
        self.fails = fails
        self.read: list[tuple[str, int, bytes]] = []

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        self.read = []

    async def receive_serialized(self, index: int, payloads: Sequence[str]) -> None:
        if self.fails and index == 2:
            raise RuntimeError(f"{self.name} died")
        for name in payloads if self.gpus else ():
            owner, number, _ = json.loads(name)
            self.read.append((owner, number, self.memory.held.pop(name)))

    async def nothing(self, *_: Any) -> None: ...

    health = pause = end_update = set_version = resume = kill = nothing


class World:
    """Four ranks, and engines: their GPUs by name."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        engines: Mapping[str, Sequence[str]],
        fails: str = "",
    ) -> None:
        self.memory = Memory()
        self.folder = folder
        self.engines = [
            Engine(name, gpus, self.memory, fails=name == fails) for name, gpus in engines.items()
        ]

        def release(name: bytes, offset: int) -> None:
            # A count that its reader has closed already may be another handle's by now.
            del self.memory.held[name.decode()]

        monkeypatch.setattr(serialized.base64, "b64decode", str.encode)
        monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release)

    def publish(self, *, times: int = 1) -> list[Backend]:
        store = HashStore()
        broadcast = Broadcast()
        config = Config.model_validate(
            {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"paths": ["d"]},
             "training": {"steps": 1}}
        )  # fmt: skip
        fleet: Any = StaticParticipants(self.engines)  # type: ignore[arg-type]
        publication = WeightPublication(config, fleet)
        thread = LoopThread("engines")

        def rank(number: int) -> Backend:
            sync = RankSync(store, number, RANKS, timeout_s=20.0)
            backend = Backend(number, broadcast)
            ranks = SenderRanks(
                sync,
                make=lambda transport: Maker(self.memory, GPUS[number]),
                address=RankAddress(GPUS[number][0], f"GPU-{number}", GPUS[number]),
                calls=None if number else calls_of(publication, thread.loop, 20.0),
            )
            journal = None if number else VersionJournal(self.folder / "versions.jsonl")
            made: Any = backend
            publisher = WeightPublisher(made, sync, ranks, journal=journal, timeout_s=20.0)
            for step in range(times):
                assert publisher.publish(step) == ""
            return backend

        with ThreadPoolExecutor(RANKS) as pool:
            backends = list(pool.map(rank, range(RANKS)))
        thread.close()
        return backends


def expected(gpus: Sequence[str]) -> list[tuple[str, int, bytes]]:
    return [(gpu, k, bytes([k] * 16)) for k in range(len(BUCKETS)) for gpu in gpus]


@pytest.mark.parametrize(
    "engines",
    [
        {"a": ["x 5"], "b": ["x 2"], "c": ["y 5"], "d": ["y 0"]},
        {"a": ["x 2", "x 5"], "b": ["y 0", "y 5"]},
        {"a": ["y 0"]},  # not on rank 0's node
    ],
)
def test_each_engine_reads_its_own_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: dict[str, list[str]]
) -> None:
    world = World(tmp_path, monkeypatch, engines)
    backends = world.publish(times=2)
    for engine in world.engines:
        assert engine.read == expected(engines[engine.name])
    assert all(backend.everywhere == [True, True] for backend in backends)
    assert world.memory.held == {}


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_what_a_dead_engine_leaves_unread_is_freed_on_its_node_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    gpus = {"a": ["x 5"], "b": ["y 5"], "c": ["y 0"]}
    world = World(tmp_path, monkeypatch, gpus, fails=lost)
    world.publish()
    for engine in world.engines:
        if engine.name != lost:
            assert engine.read == expected(gpus[engine.name])
    assert world.memory.held == {}
    # Of the attempt that failed one of each rank a bucket, at most one bucket beyond.
    assert world.memory.made <= 3 * 4 + 2 * len(BUCKETS)


def test_without_engines_that_take_handles_only_rank_0_has_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, {"a": []})
    backends = world.publish()
    assert all(backend.everywhere == [False] for backend in backends)
    assert world.memory.made == 0
