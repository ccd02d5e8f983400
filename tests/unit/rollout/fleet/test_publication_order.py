"""A publication over gloo in one process: the order of an engine's calls, bytes and digests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import Config
from rlcore.errors import EngineFailed, PublicationFailed
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.asyncio_utils import LoopThread
from rollout.weight_sync.digests import Digest
from rollout.weight_sync.process_group import GroupAddress, WeightGroup
from tests.one_rank import OneRank
from tests.static_participants import StaticParticipants

BUCKETS = cut_buckets([TensorSpec(f"w{i}", (64,), "float32") for i in range(4)], 256)
PREPARED = ["health", "pause drain", "begin_update"]
FINISHED = ["received_digests", "end_update", "set_version", "resume"]


class GlooEngine:
    """Writes down its calls, and receives over the group that it was sent to."""

    transports = ("distributed",)
    url = "http://127.0.0.1:1"
    group_ranks = 1
    digests_weights = True

    def __init__(self, name: str, *, queues: bool) -> None:
        self.name = name
        self.queues_buckets = queues
        self.in_group: str | None = None
        self.calls: list[str] = []
        self.received: list[bytes] = []
        self.fails_at = -1
        self._group: WeightGroup | None = None
        self._digest: Digest | None = None
        self._turn = asyncio.Lock()

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)

        async def call(*given: Any) -> None:
            self.calls.append(" ".join([verb, *map(str, given)]) if verb == "pause" else verb)

        return call

    async def health(self) -> dict[str, None]:
        self.calls.append("health")
        return {"gpu": None}

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        self.calls.append("begin_update")
        self.received = []
        self._digest = None

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        self.calls.append("join_group")
        self._group = await asyncio.to_thread(
            WeightGroup, address, rank, device=torch.device("cpu")
        )
        self.in_group = address.name

    async def receive_bucket(self, index: int, flat: None, order: str) -> None:
        self.calls.append(f"receive_bucket {index}")
        async with self._turn:
            if index == self.fails_at:
                raise EngineFailed(f"{self.name} has no memory")
            assert self._group is not None
            got = await asyncio.to_thread(self._group.receive, BUCKETS[index].num_bytes)
            self._digest = self._digest or Digest(order)
            self._digest.add(got)
            self.received.append(got.numpy().tobytes())

    async def received_digests(self) -> list[str]:
        self.calls.append("received_digests")
        assert self._digest is not None
        return [self._digest.read()]

    async def kill(self) -> None:
        if self._group is not None:
            self._group.close()


def flat_of(bucket: Bucket, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + bucket.index)
    size = (bucket.num_bytes,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[tuple[OneRank, list[GlooEngine], StaticParticipants]]:
    config = Config.model_validate(
        {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"paths": ["d"]},
         "training": {"steps": 1}, "rollout": {"engine": {"update_timeout_s": 20.0}}}
    )  # fmt: skip
    thread = LoopThread("engines")
    engines = [GlooEngine(f"engine-{i}", queues=i == 0) for i in range(3)]
    fleet = StaticParticipants(engines)  # type: ignore[arg-type]
    made = OneRank(config, fleet, thread.loop)
    yield made, engines, fleet
    made.close()
    for engine in engines:
        thread.call(engine.kill(), seconds=10, what="the end")
    thread.close()


def publish(trainer: OneRank, version: int) -> None:
    trainer.prepare(BUCKETS)
    for bucket in BUCKETS:
        trainer.send(bucket, flat_of(bucket, version))
    trainer.finish(version)


def test_an_engine_gets_its_calls_in_one_order(trainer: Any) -> None:
    made, engines, _ = trainer
    taken = [f"receive_bucket {bucket.index}" for bucket in BUCKETS]
    for version, joins in ((1, ["health", "join_group"]), (2, [])):
        publish(made, version)
        for engine in engines:
            assert engine.calls == [*PREPARED, *joins, *taken, *FINISHED]
            assert engine.received == [
                flat_of(bucket, version).numpy().tobytes() for bucket in BUCKETS
            ]
            engine.calls.clear()


def test_an_engine_that_fails_is_out_and_the_others_keep_their_groups(trainer: Any) -> None:
    made, engines, fleet = trainer
    publish(made, 1)
    groups = dict(made.sender._groups)
    engines[1].fails_at = 2
    made.prepare(BUCKETS)
    for bucket in BUCKETS[:2]:
        made.send(bucket, flat_of(bucket, 2))
    with pytest.raises(PublicationFailed, match="engine-1 has no memory"):
        made.send(BUCKETS[2], flat_of(BUCKETS[2], 2))
    made.send_after_a_failure(BUCKETS[3], flat_of(BUCKETS[3], 2))
    made.cancel()
    assert [len(engine.received) for engine in engines] == [4, 2, 3], "as far as they were called"
    assert fleet.dropped == {"engine-1": "engine-1 has no memory"}
    del groups["engine-1"]
    assert made.sender._groups == groups
    for engine in engines:
        engine.calls.clear()
    publish(made, 3)
    assert "join_group" not in engines[0].calls + engines[2].calls
    assert (
        engines[0].received
        == engines[2].received
        == [flat_of(bucket, 3).numpy().tobytes() for bucket in BUCKETS]
    )
