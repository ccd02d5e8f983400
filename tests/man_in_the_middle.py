"""Somebody between trainer and engine who relays the weights, and changes one byte of them."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlcore.errors import RunFailed
from rlcore.stores import bound_store
from rlcore.weights import Bucket
from rollout.weight_sync.process_group import GroupAddress, WeightGroup

CPU = torch.device("cpu")


class ManInTheMiddle:
    """Is in two groups: the trainer takes him for the engine, the engine for the trainer.

    As one who has exchanged addresses in the store where they meet. He sees what goes over the
    groups, and nothing of the control channel.

    Args:
        flips: the index of the bucket, and of the byte in it, whose lowest bit he flips; None: he
            only reads.
    """

    def __init__(self, flips: tuple[int, int] | None) -> None:
        self.flips = flips
        self.seen: list[bytes] = []

    def stand_before(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have `engine` join our group in place of the trainer's."""
        join, begin = engine.join_group, engine.begin_update
        sizes: list[int] = []

        async def begin_update(buckets: Sequence[Bucket]) -> None:
            sizes[:] = [bucket.num_bytes for bucket in buckets]
            await begin(buckets)

        async def join_group(address: GroupAddress, rank: int) -> None:
            store = await asyncio.to_thread(bound_store, "127.0.0.1", address.timeout_s)
            own = dataclasses.replace(address, port=store.port)
            threading.Thread(
                target=self._relay, args=(address, own, store, list(sizes)), daemon=True
            ).start()
            await join(own, rank)

        monkeypatch.setattr(engine, "begin_update", begin_update)
        monkeypatch.setattr(engine, "join_group", join_group)

    def _relay(
        self, trainers: GroupAddress, own: GroupAddress, store: Any, sizes: Sequence[int]
    ) -> None:
        joined: list[WeightGroup] = []

        def join_trainer() -> None:
            joined.append(WeightGroup(trainers, 1, device=CPU))

        joining = threading.Thread(target=join_trainer)
        joining.start()
        engine = WeightGroup(own, 0, device=CPU, store=store)
        joining.join()
        [trainer] = joined
        while True:
            for index, size in enumerate(sizes):
                try:
                    flat = trainer.receive(size).clone()
                except RunFailed:  # the trainer has left
                    engine.close()
                    return
                self.seen.append(flat.numpy().tobytes())
                if self.flips is not None and self.flips[0] == index:
                    flat[self.flips[1]] ^= 1
                engine.send(flat)
