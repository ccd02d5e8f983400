"""A publication to engines of another process: orders, calls and digests over its socket, bytes
over gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rlcore.config import Config
from rlcore.interfaces import RankAddress
from rlcore.launch.service import client as client_module
from rlcore.launch.service.client import ServiceClient
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import PublicationCalls, SenderRanks
from rlcore.trainer.weight_publisher import WeightPublisher
from rlcore.weights import Bucket
from rollout.weight_sync.choose import make_sender
from tests.gloo_engine import BUCKETS, flat_of


class Backend:
    """Has the weights of `seed`, and calls `at` with each bucket."""

    seed = 0

    base = None

    def buckets(self) -> tuple[Bucket, ...]:
        return BUCKETS

    def at(self, bucket: Bucket) -> None: ...

    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, torch.Tensor]]:
        for bucket in BUCKETS:
            self.at(bucket)
            yield bucket, flat_of(bucket, self.seed)


def test_a_whole_publication_and_one_in_which_the_service_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MODULE", "tests.unit.launch.service.publishing_child")
    config = Config.model_validate(
        {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"paths": ["d"]},
         "training": {"steps": 1}}
    )  # fmt: skip
    client = ServiceClient(config)
    client.open(config, greedy_baseline=False)
    sync = RankSync(HashStore(), 0, 1, timeout_s=60.0)
    ranks = SenderRanks(
        sync,
        make=lambda transport: make_sender(transport, config, torch.device("cpu")),
        address=RankAddress("here"),
        calls=PublicationCalls(client.begin_publication, 60.0),
    )
    backend: Any = Backend()
    journal = VersionJournal(tmp_path / "versions.jsonl")
    publisher = WeightPublisher(backend, sync, ranks, journal=journal, timeout_s=60.0)

    def check() -> None:
        sent = [flat_of(bucket, backend.seed).numpy().tobytes() for bucket in BUCKETS]
        assert client.call("source", "received") == [sent, sent]

    assert publisher.publish(1) == ""
    check()
    first = client.pid

    def die_at_the_second_bucket(bucket: Bucket) -> None:
        if bucket.index == 1 and client.pid == first:
            os.kill(first, signal.SIGKILL)

    backend.at = die_at_the_second_bucket
    backend.seed = 1
    assert publisher.publish(2) == ""
    assert client.pid != first
    check()
    assert publisher.version == 3, "the version of the attempt that was lost is not used again"
    ranks.close()
    client.close()
