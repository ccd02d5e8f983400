"""Engines in this process that receive weights over gloo, and the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from rlcore.errors import EngineFailed
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.weight_sync.digests import Digest
from rollout.weight_sync.process_group import GroupAddress, WeightGroup

BUCKETS = cut_buckets([TensorSpec(f"w{i}", (64,), "float32") for i in range(4)], 256)


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
