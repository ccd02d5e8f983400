"""A bucket goes into the model while the next one comes; nothing is lost of it, and nothing of its
failure.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import orjson
import pytest
import torch

from rlcore.errors import RunFailed
from rlcore.weights import TensorSpec, cut_buckets
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.server import EngineServer

BUCKETS = cut_buckets([TensorSpec(f"w{i}", (4,), "float32") for i in range(3)], 16)


@dataclasses.dataclass
class Group:
    """Buckets of zeros, ones, twos, in two buffers by turns, as the real group has them."""

    received: int = 0
    buffers: tuple[torch.Tensor, ...] = tuple(torch.empty(16, dtype=torch.uint8) for _ in range(2))

    def receive(self, num_bytes: int) -> torch.Tensor:
        assert num_bytes == 16
        buffer = self.buffers[self.received % 2].fill_(self.received)
        self.received += 1
        return buffer


class Engine:
    """Applies a bucket when it may."""

    name = "engine-0"

    def __init__(self) -> None:
        self.may_apply = asyncio.Event()
        self.applied: list[int] = []
        self.ended = self.fails = False

    async def begin_update(self, buckets: Any) -> None:
        self.applied = []

    async def receive_bucket(self, index: int, flat: torch.Tensor) -> None:
        await asyncio.wait_for(self.may_apply.wait(), 20)
        if self.fails:
            raise RunFailed("out of memory")
        assert flat.tolist() == [index] * 16
        self.applied.append(index)

    async def end_update(self) -> None:
        assert len(self.applied) == len(BUCKETS)
        self.ended = True

    def __getattr__(self, verb: str) -> Any:
        return getattr(EmbeddedEngine, verb)


def serve() -> tuple[EngineServer, Engine]:
    engine = Engine()
    server = EngineServer(engine, "key")  # type: ignore[arg-type]
    server._group = Group()  # type: ignore[assignment]
    return server, engine


async def begin(server: EngineServer) -> None:
    await server.verbs["begin_update"]({"buckets": orjson.loads(orjson.dumps(BUCKETS))})


async def test_the_answer_comes_before_the_bucket_is_applied_and_the_end_waits_for_all() -> None:
    server, engine = serve()
    await begin(server)
    await asyncio.wait_for(server.verbs["receive_bucket"]({"index": 0}), 20)
    assert engine.applied == []
    second = asyncio.ensure_future(server.verbs["receive_bucket"]({"index": 1}))
    await asyncio.sleep(0.05)
    # its bytes are here, but the third would overwrite the first
    assert not second.done()
    engine.may_apply.set()
    await second
    await server.verbs["receive_bucket"]({"index": 2})
    await server.verbs["end_update"]({})
    assert engine.applied == [0, 1, 2]
    assert engine.ended


async def test_calls_that_come_in_another_order_wait_for_their_turn() -> None:
    server, engine = serve()
    await begin(server)
    engine.may_apply.set()
    receive = server.verbs["receive_bucket"]
    await asyncio.wait_for(asyncio.gather(*(receive({"index": k}) for k in (2, 1, 0))), 20)
    await server.verbs["end_update"]({})
    assert engine.applied == [0, 1, 2]


async def test_a_call_that_waits_is_refused_when_the_bucket_before_it_fails() -> None:
    server, _ = serve()
    await begin(server)
    server._group = None
    later = asyncio.ensure_future(server.verbs["receive_bucket"]({"index": 1}))
    await asyncio.sleep(0)
    with pytest.raises(RunFailed, match="is in no weight group"):
        await server.verbs["receive_bucket"]({"index": 0})
    with pytest.raises(RunFailed, match="bucket 1 cannot be taken: bucket 0 was not"):
        await asyncio.wait_for(later, 20)


@pytest.mark.parametrize("told_by", ["receive_bucket", "end_update"])
async def test_a_bucket_that_cannot_be_applied_is_told_with_the_next_step(told_by: str) -> None:
    server, engine = serve()
    await begin(server)
    engine.fails = True
    engine.may_apply.set()
    await server.verbs["receive_bucket"]({"index": 0})
    with pytest.raises(RunFailed, match="out of memory"):
        await server.verbs[told_by]({"index": 1})
    assert not engine.ended


async def test_a_failure_of_an_update_that_was_given_up_does_not_reach_the_next() -> None:
    server, engine = serve()
    await begin(server)
    engine.fails = True
    engine.may_apply.set()
    await server.verbs["receive_bucket"]({"index": 0})
    await begin(server)
    engine.fails = False
    server._group = Group()  # type: ignore[assignment]
    for index in range(3):
        await server.verbs["receive_bucket"]({"index": index})
    await server.verbs["end_update"]({})
    assert engine.ended
