"""Orders reach the ranks that send, what they answer and pack reaches the engines' side, and a
failure reaches all. No weights move: ranks are threads over one store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rlcore.config import Config
from rlcore.errors import PublicationFailed
from rlcore.interfaces import BucketSender, Orders, RankAddress
from rlcore.launch.compose import build_weight_publisher
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import PublicationCalls, SenderRanks
from rlcore.trainer.weight_publisher import AGAIN, DONE, WeightPublisher
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.weight_sync.sender import GroupSender

RANKS = 4
ORDERS = {0: "digest", 1: "serve a", 3: "serve b and c"}  # rank 2 serves nobody
ANSWERS = {rank: f"come here to {order}" for rank, order in ORDERS.items()}
# Rank 3 helps rank 1; nobody else enters what another rank has opened.
ENTERS = {3: [1]}
BUCKETS = cut_buckets([TensorSpec(f"w{i}", (16,), "uint8") for i in range(4)], 16)
FAILS_AT = 2
STOP = {"a": 2}


class Sender(BucketSender):
    """Notes what it is asked to do. At the last bucket it waits to hear of a failure."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.discarded: list[str] = []
        self.entered: Mapping[int, str] | None = None
        self.waits = False

    def open(self, order: str, buckets: Sequence[Bucket]) -> str:
        assert buckets == BUCKETS
        self.done.append(order)
        return f"come here to {order}"

    def enter(self, answers: Mapping[int, str]) -> None:
        self.entered = answers

    def pack(self, bucket: Bucket, flat: torch.Tensor) -> str:
        return f"{self.done[0]}: {flat[0]}"

    def send(self, bucket: Bucket, flat: torch.Tensor, stopped: Any) -> None:
        self.done.append(f"{bucket.index}: {flat[0]}")
        assert self.waits or stopped() is None
        end = time.monotonic() + 10
        while self.waits and bucket is BUCKETS[-1] and stopped() != STOP:
            assert time.monotonic() < end, "nobody said that it is over"
            time.sleep(0.001)

    def discard(self, packed: Mapping[int, str], stopped: Any) -> None:
        self.discarded += [word for word in packed.values() if stopped is None]

    def finish(self) -> str:
        return "digests"

    def end(self, *, done: bool, stopped: Any) -> None:
        self.done.append("done" if done else f"stopped: {stopped}")

    def close(self) -> None:
        self.done.append("close")


class EnginesSide:
    """Engines of which one fails where it is told to."""

    def __init__(self, **orders: bool) -> None:
        self.orders = Orders("any", ORDERS, enters=ENTERS, **orders)
        self.fails = ""
        self.given: dict[str, Any] = {}
        self.packed: list[dict[int, str]] = []

    def begin(self, method: str, *given: Any) -> Future[Any]:
        call: Future[Any] = Future()
        self.given[method] = given
        if method == "send":
            self.packed.append(given[1])
        if method == self.fails and (method != "send" or given[0] == FAILS_AT):
            call.set_exception(PublicationFailed("a failed"))
        else:
            call.set_result({"open": self.orders, "stop": STOP}.get(method))
        return call


class Backend:
    base = None

    def buckets(self) -> tuple[Bucket, ...]:
        return BUCKETS

    def export_buckets(self, *, everywhere: bool) -> Iterator[tuple[Bucket, torch.Tensor]]:
        assert everywhere
        for bucket in BUCKETS:
            yield bucket, torch.full((16,), bucket.index, dtype=torch.uint8)


class World:
    def __init__(self, folder: Path, **orders: bool) -> None:
        store = HashStore()
        self.engines = EnginesSide(**orders)
        self.senders = [Sender() for _ in range(RANKS)]
        backend: Any = Backend()

        def make(rank: int) -> WeightPublisher:
            sync = RankSync(store, rank, RANKS, timeout_s=20.0)
            ranks = SenderRanks(
                sync,
                make=lambda transport: self.senders[rank],
                address=RankAddress("here", f"GPU-{rank}"),
                calls=None if rank else PublicationCalls(self.engines.begin, 20.0),
            )
            journal = None if rank else VersionJournal(folder / "versions.jsonl")
            return WeightPublisher(backend, sync, ranks, journal=journal, timeout_s=20.0)

        with ThreadPoolExecutor(RANKS) as pool:
            self.publishers = list(pool.map(make, range(RANKS)))

    def attempt(self, fails: str = "") -> str:
        """The outcome, which all ranks agree on."""
        self.engines.fails = fails
        self.engines.packed = []
        for sender in self.senders:
            sender.done = []
            sender.waits = fails == "send"
        with ThreadPoolExecutor(RANKS) as pool:
            [outcome] = set(pool.map(lambda one: one._attempt(1), self.publishers))
        return outcome

    def done(self) -> dict[int, list[str]]:
        assert self.senders[2].done == []
        return {rank: self.senders[rank].done for rank in ORDERS}


SENT = [f"{bucket.index}: {bucket.index}" for bucket in BUCKETS]


def test_each_rank_does_what_it_is_ordered(tmp_path: Path) -> None:
    world = World(tmp_path, joins=True)
    for _ in range(2):
        assert world.attempt() == DONE
        assert [rank.gpu for rank in world.engines.given["open"][1]] == [
            f"GPU-{rank}" for rank in range(RANKS)
        ]
        assert world.engines.given["join"] == (ANSWERS,)
        assert [sender.entered for sender in world.senders[1:]] == [{}, None, {1: ANSWERS[1]}]
        assert world.engines.given["finish"][1] == "digests"
        assert world.done() == {rank: [order, *SENT, "done"] for rank, order in ORDERS.items()}


def test_what_rank_0_is_ordered_is_not_in_the_store(tmp_path: Path) -> None:
    """It has the keys of digests."""
    world = World(tmp_path, joins=True)
    orders = world.publishers[0].ranks.order(BUCKETS, only_stale=False)
    assert orders is not None
    assert not any("digest" in order for order in orders)
    assert [[name for name in "abc" if f"serve {name}" in order or f"and {name}" in order]
            for order in orders] == [[], ["a"], [], ["b", "c"]]  # fmt: skip


def test_ranks_that_send_hear_of_a_failure(tmp_path: Path) -> None:
    world = World(tmp_path, joins=True)
    assert world.attempt(fails="send") == AGAIN
    assert world.done() == {
        rank: [order, *SENT, f"stopped: {STOP}"] for rank, order in ORDERS.items()
    }
    assert world.attempt() == DONE, "of the next publication it was not said"


def test_nothing_is_sent_where_an_engine_did_not_meet_its_rank(tmp_path: Path) -> None:
    world = World(tmp_path, joins=True)
    assert world.attempt(fails="join") == AGAIN
    assert world.done() == {rank: [order, "stopped: None"] for rank, order in ORDERS.items()}


def test_the_engines_get_what_each_rank_packed(tmp_path: Path) -> None:
    world = World(tmp_path, gathers=True)
    assert world.attempt() == DONE
    assert world.engines.packed == [
        {rank: f"{order}: {bucket.index}" for rank, order in ORDERS.items()} for bucket in BUCKETS
    ]


def test_what_was_packed_and_is_not_read_is_discarded(tmp_path: Path) -> None:
    """Engines that are left read what came with the bucket that failed; ranks may be ahead."""
    world = World(tmp_path, gathers=True)
    assert world.attempt(fails="send") == AGAIN
    assert len(world.engines.packed) == FAILS_AT + 1
    assert world.senders[0].discarded in ([], [f"{ORDERS[1]}: 3"], [f"{ORDERS[3]}: 3"],
                                          [f"{ORDERS[1]}: 3", f"{ORDERS[3]}: 3"])  # fmt: skip


def test_the_end_of_a_run_closes_what_a_rank_has_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[GroupSender] = []
    monkeypatch.setattr(GroupSender, "close", lambda sender: closed.append(sender))
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
        made.ranks._sender_of("distributed")
        assert closed == []
    assert len(closed) == 1
