"""The first publication by handle is verified although nobody asked: by handle, weights could be
torn in silence. The engine and its checksums are scripted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rlcore.config import Config
from rlcore.errors import ConfigError, RunFailed
from rlcore.weights import TensorSpec, cut_buckets
from rollout.asyncio_utils import LoopThread
from rollout.weight_sync.publication import WeightPublication
from tests.static_participants import StaticParticipants

BUCKETS = cut_buckets([TensorSpec("w", (16,), "uint8")], 16)
FLAT = torch.zeros(16, dtype=torch.uint8)


class Verifier:
    def __init__(self, certain: bool) -> None:
        self.certain = certain

    def add(self, name: str, tensor: torch.Tensor) -> None: ...

    def mismatch(self, reported: str) -> str | None:
        return None if reported == "right" else "w differs"


class Engine:
    """Takes every step; its checksum is `holds`."""

    name = "engine-0"
    transports = ("tensor",)
    group_ranks = 1
    gpus = ("3",)

    def __init__(self, *, holds: str = "right", certain: bool = True, known: bool = True) -> None:
        self.holds = holds
        self.certain = certain
        self.known = known
        self.checksums = 0

    async def step(self, *arguments: Any) -> dict[str, Any]:
        return {}

    health = pause = begin_update = receive_serialized = end_update = step
    set_version = resume = kill = step

    async def checksum(self) -> str:
        self.checksums += 1
        return self.holds

    def verifier(self) -> Verifier:
        if not self.known:
            raise ConfigError("it is not known how SGLang lays out a model of type x")
        return Verifier(self.certain)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("engines")
    yield thread
    thread.close()


def publish(
    loop: LoopThread,
    engine: Engine,
    *,
    times: int = 2,
    trainer_gpus: Sequence[str] = ("0", "3"),
    **settings: Any,
) -> None:
    config = Config.model_validate({
        "run": {"name": "test"}, "model": {"path": "m"}, "data": {"paths": "none.jsonl"},
        "training": {"steps": 1}, "rollout": {"engine": {"kind": "sglang"} | settings},
    })  # fmt: skip
    participants: Any = StaticParticipants([engine])  # type: ignore[list-item]
    sink = WeightPublication(config, participants, loop.loop, device="cuda")
    for version in range(1, times + 1):
        sink.prepare(BUCKETS, trainer_gpus=trainer_gpus)
        handles = {gpu: json.dumps({"payload": "x"}) for gpu in sink.handle_gpus}
        sink.send(BUCKETS[0], FLAT, handles or None)
        sink.finish(version)


@pytest.mark.parametrize(
    ("settings", "looked_at"),
    [
        ({}, 1),
        ({"verify_every": 1}, 2),
        ({"verify_every": 0}, 0),
        # bytes, not handles
        ({"trainer_gpus": ["0"]}, 0),
    ],
)
def test_once_unless_the_user_says_otherwise(
    loop: LoopThread, settings: dict[str, Any], looked_at: int
) -> None:
    engine = Engine()
    publish(loop, engine, **settings)
    assert engine.checksums == looked_at


def test_torn_weights_are_not_served_and_the_key_is_named(loop: LoopThread) -> None:
    engine = Engine(holds="torn")
    with pytest.raises(RunFailed, match=r"w differs \(looked at because .*verify_every: 0 turns"):
        publish(loop, engine)


def test_an_order_that_is_not_known_proves_nothing(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    publish(loop, Engine(holds="another order", certain=False))
    with caplog.at_level(logging.INFO):
        publish(loop, Engine(known=False))
    assert "by handle is not verified: it is not known how SGLang" in caplog.text
    with pytest.raises(ConfigError, match="it is not known"):
        publish(loop, Engine(known=False), verify_every=1)
