"""Rank 0's orders reach the ranks that send, and its giving up too. No weights move: ranks are
threads over one store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rlcore.config import Config
from rlcore.errors import PublicationFailed
from rlcore.interfaces import RankPlace
from rlcore.launch.compose import build_weight_publisher
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import SenderRanks
from rlcore.trainer.weight_publisher import AGAIN, DONE, WeightPublisher
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.weight_sync.groups.rank_sender import RankSender

RANKS = 4
ORDERS = {1: "serve a", 3: "serve b and c"}  # rank 2 serves nobody
PLACES = {rank: f"come here to {order}" for rank, order in ORDERS.items()}
BUCKETS = cut_buckets([TensorSpec(f"w{i}", (16,), "uint8") for i in range(4)], 16)
FAILS_AT = 2


class Sender:
    """Notes what it is asked to do. At the last bucket it waits to hear that rank 0 gave up."""

    def __init__(self, rank: int) -> None:
        self.gpu = f"GPU-{rank}"
        self.done: list[str] = []
        self.waits = False

    def open(self, order: str) -> str:
        self.done.append(order)
        return f"come here to {order}"

    def enter(self, places: Mapping[int, str]) -> None:
        assert places == PLACES

    def send(self, bucket: Bucket, flat: torch.Tensor, given_up: Callable[[], str | None]) -> None:
        self.done.append(f"{bucket.index}: {flat[0]}")
        assert self.waits or given_up() is None
        end = time.monotonic() + 10
        while self.waits and bucket is BUCKETS[-1] and given_up() != "not after 2":
            assert time.monotonic() < end, "nobody said that it is over"
            time.sleep(0.001)

    def abandon(self) -> None:
        self.done.append("abandon")

    def close(self) -> None:
        self.done.append("close")


class Sink:
    """Engines of which one fails where it is told to."""

    handle_gpus = ()
    sender_orders = ORDERS
    stop_order = "not after 2"

    def __init__(self) -> None:
        self.fails = ""
        self.ranks: Sequence[RankPlace] = ()
        self.places: Mapping[int, str] = {}

    def prepare(self, buckets: Sequence[Bucket], **given: Any) -> None:
        self.ranks = given["trainer_ranks"]

    def meet(self, places: Mapping[int, str]) -> None:
        self.places = places
        if self.fails == "meet":
            raise PublicationFailed("b was not met")

    def send(self, bucket: Bucket, flat: torch.Tensor, handles: None) -> None:
        if self.fails == "send" and bucket.index == FAILS_AT:
            raise PublicationFailed("a did not take it")

    def send_called(self, bucket: Bucket, flat: torch.Tensor) -> None: ...

    def finish(self, version: int) -> None: ...

    def cancel(self) -> None: ...


class Backend:
    def buckets(self) -> tuple[Bucket, ...]:
        return BUCKETS

    def export_buckets(self, *, everywhere: bool) -> Iterator[tuple[Bucket, torch.Tensor]]:
        assert everywhere
        for bucket in BUCKETS:
            yield bucket, torch.full((16,), bucket.index, dtype=torch.uint8)


class World:
    def __init__(self, folder: Path) -> None:
        store = HashStore()
        self.sink = Sink()
        self.senders = [Sender(rank) for rank in range(RANKS)]

        def make(rank: int) -> WeightPublisher:
            sync = RankSync(store, rank, RANKS, timeout_s=20.0)
            return WeightPublisher(
                Backend(),  # type: ignore[arg-type]
                sync,
                sink=None if rank else self.sink,  # type: ignore[arg-type]
                journal=None if rank else VersionJournal(folder / "versions.jsonl"),
                timeout_s=20.0,
                senders=SenderRanks(sync, self.senders[rank]),
            )

        with ThreadPoolExecutor(RANKS) as pool:
            self.publishers = list(pool.map(make, range(RANKS)))

    def attempt(self, fails: str = "") -> str:
        """The outcome, which all ranks agree on."""
        self.sink.fails = fails
        for sender in self.senders:
            sender.done = []
            sender.waits = fails == "send"
        with ThreadPoolExecutor(RANKS) as pool:
            [outcome] = set(pool.map(lambda one: one._attempt(1), self.publishers))
        return outcome


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


SENT = [f"{bucket.index}: {bucket.index}" for bucket in BUCKETS]


def test_each_rank_serves_whom_rank_0_says(world: World) -> None:
    for _ in range(2):
        assert world.attempt() == DONE
        assert [place.gpu for place in world.sink.ranks] == [f"GPU-{rank}" for rank in range(RANKS)]
        assert world.sink.places == PLACES
        assert [sender.done for sender in world.senders] == [
            [], ["serve a", *SENT], [], ["serve b and c", *SENT],
        ]  # fmt: skip


def test_a_rank_that_sends_hears_that_rank_0_gave_up(world: World) -> None:
    assert world.attempt(fails="send") == AGAIN
    assert [sender.done for sender in world.senders] == [
        [], ["serve a", *SENT, "abandon"], [], ["serve b and c", *SENT, "abandon"],
    ]  # fmt: skip
    assert world.attempt() == DONE, "of the next publication it was not said"


def test_nothing_is_sent_where_an_engine_did_not_meet_its_rank(world: World) -> None:
    assert world.attempt(fails="meet") == AGAIN
    assert [sender.done for sender in world.senders] == [
        [], ["serve a", "abandon"], [], ["serve b and c", "abandon"],
    ]  # fmt: skip


def test_the_end_of_a_run_closes_what_a_rank_has_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[RankSender] = []
    monkeypatch.setattr(RankSender, "close", lambda sender: closed.append(sender))
    config = Config.model_validate(
        {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"paths": ["d"]},
         "training": {"steps": 1}}
    )  # fmt: skip
    sync = RankSync(HashStore(), 1, 2, timeout_s=5.0)
    process: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"), sync=sync)
    backend: Any = Backend()
    with ExitStack() as stack:
        made = build_weight_publisher(config, process, backend, None, None, stack)
        assert made is not None
        assert made.senders is not None
        assert closed == []
    assert len(closed) == 1
