"""A publication over gloo in one process: the order of an engine's calls, bytes and digests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import Config
from rlcore.errors import PublicationFailed
from rollout.asyncio_utils import LoopThread
from tests.gloo_engine import BUCKETS, GlooEngine, flat_of
from tests.one_rank import OneRank
from tests.static_participants import StaticParticipants

PREPARED = ["health", "pause drain", "begin_update"]
FINISHED = ["received_digests", "end_update", "set_version", "resume"]


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
