"""Turns of trainer and engines on shared memory: the order of operations, on one rank and two, and when an engine is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from rlcore.errors import RunFailed
from rlcore.interfaces import MemoryTag, PolicyBackend
from rlcore.trainer.gpu_sharing import Turn, Turns
from rlcore.trainer.rank_sync import Control, LocalStore

ALL = {"kv_cache", "cuda_graph", "weights"}


class Device:
    """Shared memory: what is on it, and every move. Whoever takes what does not fit fails the test."""

    def __init__(self) -> None:
        self.engines, self.trainers, self.moves = set(ALL), set[int](), list[str]()
        self.untidy = set[int]()            # trainers that keep memory of their last passes
        self.runs = self.restarts = True
        self._lock = threading.Lock()

    def engine(self, move: str, tags: Sequence[MemoryTag]) -> None:
        with self._lock:
            if move == "release":
                assert set(tags) <= self.engines, f"{tags} are not held"
                self.engines -= set(tags)
            else:
                assert not set(tags) & self.engines, f"{tags} are held already"
                assert "kv_cache" not in tags or not self.trainers, "a cache beside the trainer does not fit"
                assert not self.untidy, "weights beside what passes left behind do not fit"
                self.engines |= set(tags)
            self.moves.append(f"{move} {'+'.join(sorted(tags))}")

    def trainer(self, rank: int, move: str) -> None:
        with self._lock:
            if move == "unpark":
                assert "kv_cache" not in self.engines, "the trainer beside a cache does not fit"
                self.trainers.add(rank)
                self.untidy.add(rank)
            elif move == "trim":
                self.untidy.discard(rank)
            else:
                self.trainers.discard(rank)
                self.untidy.discard(rank)
            self.moves.append(move)


class Memory:
    """All engines."""

    def __init__(self, device: Device) -> None:
        self.device, self.failure = device, cast(Exception | None, None)

    def release(self, tags: Sequence[MemoryTag]) -> None:
        self.device.engine("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        if self.failure is not None:
            raise self.failure
        self.device.engine("restore", tags)
        if "kv_cache" in tags:
            self.device.runs |= self.device.restarts

    def anyone(self) -> bool:
        return self.device.runs


class Backend:
    def __init__(self, device: Device, rank: int) -> None:
        self.device, self.rank = device, rank

    def park(self) -> None:
        self.device.trainer(self.rank, "park")

    def unpark(self) -> None:
        self.device.trainer(self.rank, "unpark")

    def trim(self) -> None:
        self.device.trainer(self.rank, "trim")


def make(device: Device, rank: int = 0, ranks: int = 1, store: Any = None) -> Turns:
    control = Control(store or LocalStore(), rank, ranks)
    memory = Memory(device) if rank == 0 else None
    turns = Turns(control, cast(PolicyBackend, Backend(device, rank)), memory, timeout_s=5)
    assert device.moves.pop() == "park"
    return turns


def test_a_step_and_its_checkpoint() -> None:
    device = Device()
    turns = make(device)
    turns.take(Turn.GENERATING)     # rollouts: it is theirs already
    assert device.moves == []
    turns.take(Turn.TRAINING)
    assert device.moves == ["release cuda_graph+kv_cache+weights", "unpark"]
    assert (device.engines, device.trainers) == (set(), {0})
    turns.take(Turn.HANDOVER)       # to publish into
    assert device.moves[2:] == ["trim", "restore weights"]
    turns.take(Turn.HANDOVER)       # a checkpoint needs nothing more
    assert len(device.moves) == 4
    turns.take(Turn.GENERATING)
    assert device.moves[4:] == ["park", "restore cuda_graph+kv_cache"]
    assert (device.engines, device.trainers) == (ALL, set())


def test_a_checkpoint_after_an_evaluation_leaves_the_engines_their_weights() -> None:
    device = Device()
    turns = make(device)
    turns.take(Turn.HANDOVER)
    assert device.engines == {"weights"}
    turns.take(Turn.GENERATING)
    assert device.moves == ["release cuda_graph+kv_cache", "unpark", "park", "restore cuda_graph+kv_cache"]


def test_nothing_is_generated_with_weights_that_are_gone() -> None:
    turns = make(Device())
    turns.take(Turn.TRAINING)
    with pytest.raises(ValueError, match="generating cannot follow training"):
        turns.take(Turn.GENERATING)


def test_engines_that_died_start_again_where_the_trainer_is_parked() -> None:
    device = Device()
    turns = make(device)
    turns.take(Turn.TRAINING)
    device.runs = False             # the last of them died while the trainer had the device
    turns.take(Turn.HANDOVER)
    assert device.runs
    assert turns.turn is Turn.HANDOVER
    assert device.moves[2:] == [
        "trim", "restore weights", "park", "restore cuda_graph+kv_cache", "release cuda_graph+kv_cache", "unpark"
    ]  # fmt: skip


def test_where_no_engine_comes_back_the_trainer_still_gets_its_turn() -> None:
    """It has a checkpoint to write before the run fails."""
    device = Device()
    device.restarts = False
    turns = make(device)
    turns.take(Turn.TRAINING)
    device.runs = False
    turns.take(Turn.HANDOVER)
    assert turns.turn is Turn.HANDOVER
    assert device.trainers == {0}
    assert device.moves.count("park") == 1


def test_a_failure_leaves_the_turn_where_it_was() -> None:
    device = Device()
    turns = make(device)
    turns.take(Turn.TRAINING)
    memory: Any = turns._memory
    memory.failure = RunFailed("no engine is left")
    with pytest.raises(RunFailed, match="no engine is left"):
        turns.take(Turn.HANDOVER)
    assert turns.turn is Turn.TRAINING
    assert device.trainers == {0}


def test_every_rank_is_out_before_an_engine_takes_memory() -> None:
    """Rank 1 is late with everything; the device itself checks who is there."""
    device, store = Device(), LocalStore()
    late, passes = threading.Event(), threading.Barrier(2)      # what ranks do in a turn is collective

    class Slow(Backend):
        def park(self) -> None:
            late.wait(0.2)
            super().park()

        def trim(self) -> None:
            late.wait(0.2)
            super().trim()

    ranks = [make(device, rank, 2, store) for rank in range(2)]
    ranks[1]._backend = cast(PolicyBackend, Slow(device, 1))
    errors: list[BaseException] = []

    def run(turns: Turns) -> None:
        try:
            for turn in (Turn.TRAINING, Turn.HANDOVER, Turn.GENERATING, Turn.HANDOVER, Turn.GENERATING):
                turns.take(turn)
                passes.wait(5)
        except BaseException as error:  # noqa: BLE001  shown by the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(turns,)) for turns in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert errors == []
    assert (device.engines, device.trainers) == (ALL, set())
    assert device.moves.count("park") == device.moves.count("unpark") == 4
