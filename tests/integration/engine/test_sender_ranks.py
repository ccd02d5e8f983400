"""Each engine gets its weights from a rank of its own: real engines, ranks in threads."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import flatten, layout, remote_engine, tiny_qwen3
from torch.distributed import HashStore

from rlcore.config import Config
from rlcore.interfaces import RankAddress
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import SenderRanks
from rlcore.trainer.weight_publisher import AGAIN, DONE, WeightPublisher
from rlcore.weights import Bucket
from rollout.fleet.publication import WeightPublication
from rollout.weight_sync import sender as sender_module
from rollout.weight_sync.process_group import WeightGroup
from rollout.weight_sync.sender import GroupSender
from tests.one_rank import calls_of
from tests.static_participants import StaticParticipants

RANKS = 3
UPDATE_S = 60.0  # on a busy machine, where nobody is waited for in vain
HANGS_S = 10.0  # where somebody is


class Backend:
    """Yields the weights of a model on every rank that asks for them, and calls `at`."""

    base = None

    def __init__(self, model: torch.nn.Module, rank: int, at: Callable[[int, int], None]) -> None:
        self.model = model
        self.rank = rank
        self.at = at

    def buckets(self) -> tuple[Bucket, ...]:
        return layout(self.model)

    def export_buckets(
        self, *, everywhere: bool = False
    ) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
        for bucket in self.buckets():
            self.at(self.rank, bucket.index)
            shown = everywhere or self.rank == 0
            yield bucket, flatten(bucket, self.model) if shown else None


class Trainer:
    """Ranks in threads, over engines in processes."""

    def __init__(
        self, folder: Path, *, engines: int, update_s: float = UPDATE_S, **weights: int
    ) -> None:
        torch.set_num_threads(1)
        self.model = tiny_qwen3()
        self.model.config.save_pretrained(folder / "model")
        settings = {
            "device": "cpu", "threads": 1, "senders": RANKS,
            "start_timeout_s": 300.0, "request_timeout_s": 20.0, "update_timeout_s": update_s,
            **weights,
        }  # fmt: skip
        self.config = Config.model_validate(
            {
                "run": {"name": "test"},
                "model": {"path": str(folder / "model"), "dtype": "fp32"},
                "data": {"paths": "none.jsonl"},
                "training": {"steps": 1},
                "rollout": {"engine": settings},
            }
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engines = [
            remote_engine(
                folder / "model", config=self.config.rollout.engine, name=f"engine-{i}",
                log=folder / f"{i}.log",
            )
            for i in range(engines)
        ]  # fmt: skip
        self.do(asyncio.wait_for(self._all("start"), 120))
        self.participants = StaticParticipants(self.engines)
        publication = WeightPublication(self.config, self.participants)  # type: ignore[arg-type]
        self.at: Callable[[int, int], None] = lambda rank, bucket: None
        self.senders = [GroupSender(torch.device("cpu"), update_s) for _ in range(RANKS)]
        store = HashStore()
        syncs = [RankSync(store, rank, RANKS, timeout_s=60.0) for rank in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:
            together = list(
                pool.map(
                    lambda sync: SenderRanks(
                        sync,
                        make=lambda transport: self.senders[sync.rank],
                        address=RankAddress("here"),
                        calls=None if sync.rank else calls_of(publication, self.loop),
                    ),
                    syncs,
                )
            )
        self.publishers = [
            WeightPublisher(
                Backend(self.model, rank, lambda *where: self.at(*where)),  # type: ignore[arg-type]
                syncs[rank],
                together[rank],
                journal=None if rank else VersionJournal(folder / "versions.jsonl"),
                timeout_s=60.0,
            )
            for rank in range(RANKS)
        ]

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(150)

    async def _all(self, what: str) -> None:
        await asyncio.gather(*(getattr(engine, what)() for engine in self.engines))

    def publish(self, step: int) -> None:
        with ThreadPoolExecutor(RANKS) as pool:
            said = list(pool.map(lambda publisher: publisher.publish(step), self.publishers))
        assert said == [""] * RANKS

    def attempt(self, step: int | None) -> str:
        with ThreadPoolExecutor(RANKS) as pool:
            [said] = set(pool.map(lambda publisher: publisher._attempt(step), self.publishers))
        return said

    def published(self, step: int, engines: list[int]) -> None:
        """Publish, and check that these engines have it."""
        self.publish(step)
        for number in engines:
            assert self.do(self.engines[number].health())["version"] == self.publishers[0].version

    def served(self) -> list[list[str]]:
        """The engines of each rank beside rank 0, whose groups are open."""
        return [sorted(sender._groups) for sender in self.senders[1:]]

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        self.do(self._all("kill"))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    made = Trainer(tmp_path, **request.param)
    yield made
    made.close()


@pytest.mark.parametrize("trainer", [{"engines": 4}], indirect=True)
def test_engines_are_dealt_out_and_keep_their_groups(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every engine verifies what it got, by its digest."""
    sent: list[int] = []  # bytes, of all groups together
    original = WeightGroup.send

    def send(group: WeightGroup, flat: torch.Tensor) -> None:
        sent.append(flat.numel())
        original(group, flat)

    monkeypatch.setattr(WeightGroup, "send", send)
    trainer.publish(1)
    assert trainer.served() == [["engine-1"], ["engine-2"]]
    groups = [dict(sender._groups) for sender in trainer.senders]
    total = sum(bucket.num_bytes for bucket in layout(trainer.model))
    assert sum(sent) == 4 * total
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    trainer.publish(2)
    assert [dict(sender._groups) for sender in trainer.senders] == groups
    assert [engine.name for engine in trainer.participants.engines] == [
        f"engine-{i}" for i in range(4)
    ]
    for engine in trainer.engines:
        assert trainer.do(engine.health())["version"] == 2


@pytest.mark.parametrize(
    ("trainer", "how"),
    [
        ({"engines": 5}, signal.SIGKILL),
        pytest.param({"engines": 5, "update_s": HANGS_S}, signal.SIGSTOP, marks=pytest.mark.full),
    ],
    indirect=["trainer"],
)
def test_an_engine_of_another_rank_that_dies_or_hangs_is_out_and_the_others_go_on(
    trainer: Trainer, how: signal.Signals
) -> None:
    """So does engine 4, of the same rank, which may have been called for a bucket ahead."""
    trainer.publish(1)
    kept = dict(trainer.senders[2]._groups)
    doomed = trainer.engines[1]

    def at(rank: int, bucket: int) -> None:
        if rank == 0 and bucket == 1:
            os.kill(doomed.pid, how)

    trainer.at = at
    assert trainer.attempt(2) == AGAIN
    assert trainer.served()[0] in ([], ["engine-4"]), "a rank may be a bucket ahead"
    trainer.at = lambda rank, bucket: None
    assert list(trainer.participants.dropped) == ["engine-1"]
    assert trainer.attempt(2) == DONE
    left = [engine for engine in trainer.engines if engine is not doomed]
    assert [trainer.do(engine.health())["version"] for engine in left] == [3] * 4
    assert list(trainer.senders[1]._groups) == ["engine-4"]
    assert list(trainer.senders[2]._groups) == list(kept)


@pytest.mark.parametrize("trainer", [{"engines": 3}], indirect=True)
def test_an_engine_that_was_started_again_meets_its_rank_anew(trainer: Trainer) -> None:
    trainer.publish(1)
    again = trainer.engines[2]
    before = trainer.senders[2]._groups["engine-2"]
    trainer.do(again.kill())
    trainer.do(again.start())
    trainer.publish(2)
    assert trainer.senders[2]._groups["engine-2"] is not before
    assert trainer.do(again.health())["version"] == 2
    assert trainer.participants.dropped == {}


TOGETHER = {"engines": 2, "senders": 1, "rails": RANKS}


@pytest.mark.parametrize("trainer", [TOGETHER], indirect=True)
def test_ranks_are_in_the_group_of_one_engine_together(trainer: Trainer) -> None:
    """Rank 1 sends to it, ranks 2 and 0 pass on; rank 0 sends to the other engine alone."""
    trainer.publish(1)
    groups = [dict(sender._groups) for sender in trainer.senders]
    assert [sorted(group) for group in groups] == [
        ["engine-0", "engine-1"], ["engine-0"], ["engine-0"],
    ]  # fmt: skip
    members = [groups[rank]["engine-0"] for rank in (1, 2, 0)]
    assert [member.rank for member in members] == [0, 1, 2]
    assert {member.address.world_size for member in members} == {RANKS + 1}
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    trainer.published(2, [0, 1])
    assert [dict(sender._groups) for sender in trainer.senders] == groups
    assert trainer.participants.dropped == {}


@pytest.mark.parametrize(
    ("trainer", "how"),
    [(TOGETHER, signal.SIGKILL), ({**TOGETHER, "update_s": HANGS_S}, signal.SIGSTOP)],
    indirect=["trainer"],
)
def test_an_engine_of_several_ranks_that_dies_or_hangs_is_out_and_the_other_goes_on(
    trainer: Trainer, how: signal.Signals
) -> None:
    trainer.publish(1)

    def at(rank: int, bucket: int) -> None:
        if rank == 0 and bucket == 1:
            os.kill(trainer.engines[0].pid, how)

    trainer.at = at
    assert trainer.attempt(2) == AGAIN
    trainer.at = lambda rank, bucket: None
    assert [[*sender._groups] for sender in trainer.senders] == [["engine-1"], [], []]
    assert list(trainer.participants.dropped) == ["engine-0"]
    trainer.published(2, [1])


@pytest.mark.parametrize("left", [2, pytest.param(0, marks=pytest.mark.full)])
@pytest.mark.parametrize("trainer", [TOGETHER], indirect=True)
def test_a_rank_that_left_the_group_of_an_engine_is_found_out_and_rank_0_goes_on_alone(
    trainer: Trainer, left: int
) -> None:
    trainer.publish(1)
    trainer.senders[left]._groups["engine-0"].close()
    assert trainer.attempt(2) == AGAIN
    assert trainer.participants.dropped == {
        "engine-0": f"engine engine-0 is in a group that rank {left} has left"
    }
    again = trainer.engines[0]
    trainer.do(again.kill())
    trainer.do(again.start())
    trainer.participants.engines.append(again)
    trainer.published(2, [0, 1])
    assert [[*sender._groups] for sender in trainer.senders] == [["engine-1", "engine-0"], [], []]


@pytest.mark.parametrize("trainer", [{"engines": 2}], indirect=True)
def test_a_rank_that_reaches_no_engine_says_so(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.local()
    original = sender_module.open_rendezvous
    opening = trainer.senders[1]._open

    def rendezvous(*arguments: Any) -> Any:
        if getattr(here, "is_rank_1", False):
            raise OSError("no route to host")
        return original(*arguments)

    def open_there(order: Any) -> Any:
        here.is_rank_1 = True
        return opening(order)

    monkeypatch.setattr(sender_module, "open_rendezvous", rendezvous)
    monkeypatch.setattr(trainer.senders[1], "_open", open_there)
    assert trainer.attempt(1) == AGAIN
    assert trainer.participants.dropped == {
        "engine-1": "rank 1 cannot open a group with engine engine-1: no route to host"
    }
    assert trainer.attempt(1) == DONE
    assert trainer.do(trainer.engines[0].health())["version"] == 2
