"""What a publication costs the ranks' store: it grows with the ranks, and not faster.

Ranks are threads over one store. The orders are the real ones, for engines of which each has eight
ranks of its own; no bytes are sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rlcore.interfaces import RankAddress
from rlcore.runs.versions import VersionJournal
from rlcore.trainer import sender_ranks
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import PublicationCalls, SenderRanks
from rlcore.trainer.weight_publisher import DONE, WeightPublisher
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.weight_sync.distributed import DistributedTransport
from tests.counted_store import CountedStore
from tests.empty_groups import EmptySender

OF_AN_ENGINE = 8  # ranks
LIMIT_S = 60.0


class Engine:
    url = "http://127.0.0.1:1"
    group_ranks = OF_AN_ENGINE
    in_group: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    async def health(self) -> dict[str, Any]:
        return {"gpu": self.name}

    async def join_group(self, address: Any, rank: int) -> None:
        self.in_group = address.name


class EnginesSide:
    """`WeightPublication` without pauses: its transport."""

    def __init__(self, engines: int) -> None:
        self.engines = [Engine(f"engine-{number:03d}") for number in range(engines)]
        self.transport = DistributedTransport(timeout_s=LIMIT_S, probe_s=LIMIT_S)

    def begin(self, method: str, *given: Any) -> Future[Any]:
        call: Future[Any] = Future()
        call.set_result(getattr(self, method, lambda *_: None)(*given))
        return call

    def open(self, buckets: Any, ranks: Any, *_: bool) -> Any:
        self.transport.ranks = ranks
        assert asyncio.run(self.transport.open(self.engines, buckets)) == {}
        return self.transport.orders()

    def join(self, answers: Any) -> None:
        assert asyncio.run(self.transport.join(answers)) == {}


class Backend:
    base = None

    def __init__(self, buckets: int) -> None:
        self._buckets = cut_buckets(
            [TensorSpec(f"w{i}", (16,), "uint8") for i in range(buckets)], 16
        )

    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets

    def export_buckets(self, *, everywhere: bool) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for bucket in self._buckets:
            yield bucket, torch.zeros(16, dtype=torch.uint8)


class World:
    def __init__(self, folder: Path, ranks: int, *, buckets: int = 2) -> None:
        store = HashStore()
        self.stores = [CountedStore(store) for _ in range(ranks)]
        side = EnginesSide(ranks // OF_AN_ENGINE)
        backend: Any = Backend(buckets)

        def make(rank: int) -> WeightPublisher:
            sync = RankSync(self.stores[rank], rank, ranks, timeout_s=LIMIT_S)  # type: ignore[arg-type]
            together = SenderRanks(
                sync,
                make=lambda transport: EmptySender(torch.device("cpu"), LIMIT_S),
                address=RankAddress("here", f"GPU-{rank:03d}"),
                calls=None if rank else PublicationCalls(side.begin, LIMIT_S),
            )
            journal = None if rank else VersionJournal(folder / f"{ranks}.{buckets}.jsonl")
            return WeightPublisher(backend, sync, together, journal=journal, timeout_s=LIMIT_S)

        self.pool = ThreadPoolExecutor(ranks)
        self.publishers = list(self.pool.map(make, range(ranks)))

    def publish(self, step: int) -> tuple[Counter[str], Counter[str]]:
        """What all ranks ask of the store, and what they look for."""
        for store in self.stores:
            store.count.clear()
            store.looks.clear()
        assert set(self.pool.map(lambda one: one._attempt(step), self.publishers)) == {DONE}
        counts: Counter[str] = Counter()
        looks: Counter[str] = Counter()
        for store in self.stores:
            counts += store.count
            looks += store.looks
        del counts["looks"]
        return counts, looks


@pytest.mark.parametrize("first", [True, False])
def test_requests_and_bytes_grow_no_faster_than_the_ranks(tmp_path: Path, first: bool) -> None:
    """Also where the engines grow with them."""
    found = []
    for ranks in (OF_AN_ENGINE, 2 * OF_AN_ENGINE, 4 * OF_AN_ENGINE):
        world = World(tmp_path, ranks)
        counts, _ = world.publish(1)
        found.append(counts if first else world.publish(2)[0])
    few, more, most = found
    assert most.keys() == {"writes", "reads", "bytes"}
    for kind in most:
        # The numbers of ranks get longer, too.
        assert most[kind] - more[kind] <= 2.1 * (more[kind] - few[kind]), (kind, found)


def test_ranks_look_for_a_failure_as_often_as_time_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as often as there are buckets: 128 ranks would need the store for seconds."""
    moments = SimpleNamespace(monotonic=lambda: 1.0)
    monkeypatch.setattr(sender_ranks, "time", moments)
    for buckets in (2, 50):
        _, looks = World(tmp_path, OF_AN_ENGINE, buckets=buckets).publish(1)
        assert looks["publications"] == OF_AN_ENGINE - 1
