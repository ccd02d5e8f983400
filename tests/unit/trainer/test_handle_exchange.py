"""Handles from every rank: each engine gets those of its own GPU, and none is left unread.

The ranks are threads over one store; what stands for GPU memory is a table.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from rlcore.errors import PublicationFailed
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.handle_exchange import HandleExchange
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.weight_publisher import WeightPublisher
from rlcore.weights import Bucket, TensorSpec, cut_buckets

RANKS = 4
BUCKETS = cut_buckets([TensorSpec(f"w{i}", (16,), "uint8") for i in range(6)], 16)
GPUS = ["5", "2", "7", "0"]  # of the ranks


class Memory:
    """The memory of all handles: a handle's content until it is freed."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.made = 0
        self.lock = threading.Lock()


class Maker:
    def __init__(self, memory: Memory, gpu: str) -> None:
        self.memory = memory
        self.gpu = gpu

    def make(self, bucket: Bucket, flat: torch.Tensor) -> str:
        with self.memory.lock:
            self.memory.made += 1
            name = json.dumps([self.gpu, bucket.index, self.memory.made])
            self.memory.held[name] = bytes(flat.tolist())
        return name

    def release(self, handle: str) -> None:
        self.memory.held.pop(handle, None)

    def collect(self) -> None: ...


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


class Sink:
    """Engines, each on some GPUs. Reading a handle frees its memory.

    Args:
        fails: the engine that fails at bucket 2 of the first publication, before it reads.
    """

    def __init__(
        self, memory: Memory, engines: Mapping[str, Sequence[str]], fails: str | None = None
    ) -> None:
        self.memory = memory
        self.engines = dict(engines)
        self.fails = fails
        self.read: dict[str, list[tuple[str, int, bytes]]] = {}
        self.trainer_gpus: Sequence[str] = ()

    @property
    def handle_gpus(self) -> list[str]:
        return [gpu for gpus in self.engines.values() for gpu in gpus]

    def prepare(
        self,
        buckets: Sequence[Bucket],
        *,
        only_stale: bool = False,
        trainer_gpus: Sequence[str] = (),
        trainer_ranks: Sequence[object] = (),
    ) -> None:
        self.trainer_gpus = trainer_gpus
        self.read = {name: [] for name in self.engines}

    def send(
        self, bucket: Bucket, flat: torch.Tensor, handles: Mapping[str, str] | None = None
    ) -> None:
        assert handles is not None
        failed = self.fails if bucket.index == 2 else None
        for name, gpus in self.engines.items():
            for gpu in gpus if name != failed else ():
                owner, index, _ = json.loads(handles[gpu])
                content = self.memory.held.pop(handles[gpu])
                self.read[name].append((owner, index, content))
        if failed is not None:
            self.fails = None
            del self.engines[failed]
            raise PublicationFailed(f"{failed} died")

    def finish(self, version: int) -> None: ...

    def cancel(self) -> None: ...


def publish(tmp_path: Path, sink: Sink, memory: Memory, *, times: int = 1) -> list[Backend]:
    store = HashStore()
    broadcast = Broadcast()

    def rank(number: int) -> Backend:
        sync = RankSync(store, number, RANKS, timeout_s=20.0)
        backend = Backend(number, broadcast)
        publisher = WeightPublisher(
            backend,  # type: ignore[arg-type]
            sync,
            sink=sink if number == 0 else None,  # type: ignore[arg-type]
            journal=VersionJournal(tmp_path / "versions.jsonl") if number == 0 else None,
            timeout_s=20.0,
            exchange=HandleExchange(sync, Maker(memory, GPUS[number])),
        )
        for step in range(times):
            assert publisher.publish(step) == ""
        return backend

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def expected(gpus: Sequence[str]) -> list[tuple[str, int, bytes]]:
    return [(gpu, k, bytes([k] * 16)) for k in range(len(BUCKETS)) for gpu in gpus]


@pytest.mark.parametrize(
    "engines",
    [
        {"a": ["5"], "b": ["2"], "c": ["7"], "d": ["0"]},
        {"a": ["7", "5"], "b": ["0", "2"]},
        {"a": ["0"]},  # not on rank 0's GPU
    ],
)
def test_each_engine_reads_its_own_gpus(tmp_path: Path, engines: dict[str, list[str]]) -> None:
    memory = Memory()
    sink = Sink(memory, engines)
    backends = publish(tmp_path, sink, memory, times=2)
    assert sink.trainer_gpus == GPUS
    assert sink.read == {name: expected(gpus) for name, gpus in engines.items()}
    assert all(backend.everywhere == [True, True] for backend in backends)
    assert memory.held == {}


def test_what_a_dead_engine_leaves_unread_is_freed_and_the_others_go_on(tmp_path: Path) -> None:
    memory = Memory()
    sink = Sink(memory, {"a": ["5"], "b": ["2"]}, fails="b")
    publish(tmp_path, sink, memory)
    assert sink.read == {"a": expected(["5"])}
    assert memory.held == {}
    # of the attempt that failed two a bucket, at most one bucket beyond; of the other one a bucket
    assert memory.made <= 2 * 4 + len(BUCKETS)


def test_without_engines_that_take_handles_only_rank_0_has_the_bytes(tmp_path: Path) -> None:
    memory = Memory()

    class Bytes(Sink):
        def send(
            self, bucket: Bucket, flat: torch.Tensor, handles: Mapping[str, str] | None = None
        ) -> None:
            assert handles is None

    backends = publish(tmp_path, Bytes(memory, {"a": []}), memory)
    assert all(backend.everywhere == [False] for backend in backends)
    assert memory.made == 0
