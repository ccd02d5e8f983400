"""The order of moves on shared GPUs, on one rank and two, and when an engine is lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from rlcore.data.generation import MemoryTag
from rlcore.errors import RunFailed
from rlcore.interfaces import PolicyBackend
from rlcore.trainer.gpu_sharing import GpuPhase, GpuSharing
from rlcore.trainer.rank_sync import RankSync

ALL = {"kv_cache", "cuda_graph", "weights"}
LIMIT_S = 60.0


class Device:
    """Shared memory: its contents and every move. A move that does not fit fails the test."""

    def __init__(self) -> None:
        self.engines = set(ALL)
        self.trainers = set[int]()
        self.moves = list[str]()
        self.untidy = set[int]()  # trainers that keep memory of their last passes
        self.runs = True
        self.restarts = True
        self._lock = threading.Lock()

    def engine(self, move: str, tags: Sequence[MemoryTag]) -> None:
        with self._lock:
            if move == "release":
                assert set(tags) <= self.engines, f"{tags} are not held"
                self.engines -= set(tags)
            else:
                assert not set(tags) & self.engines, f"{tags} are held already"
                assert "kv_cache" not in tags or not self.trainers, (
                    "a cache beside the trainer does not fit"
                )
                assert not self.untidy, "weights beside what passes left behind do not fit"
                self.engines |= set(tags)
            self.moves.append(f"{move} {'+'.join(sorted(tags))}")

    def trainer(self, rank: int, move: str) -> None:
        with self._lock:
            if move == "onload":
                assert "kv_cache" not in self.engines, "the trainer beside a cache does not fit"
                self.trainers.add(rank)
                self.untidy.add(rank)
            elif move == "release_cache":
                self.untidy.discard(rank)
            else:
                self.trainers.discard(rank)
                self.untidy.discard(rank)
            self.moves.append(move)


class Memory:
    """All engines."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.failure = cast(Exception | None, None)

    def release(self, tags: Sequence[MemoryTag]) -> None:
        self.device.engine("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        if self.failure is not None:
            raise self.failure
        self.device.engine("restore", tags)
        if "kv_cache" in tags:
            self.device.runs |= self.device.restarts

    def any_running(self) -> bool:
        return self.device.runs


class Backend:
    def __init__(self, device: Device, rank: int) -> None:
        self.device = device
        self.rank = rank

    def connect(self) -> None:
        self.device.trainer(self.rank, "connect")

    def offload(self) -> None:
        self.device.trainer(self.rank, "offload")

    def onload(self) -> None:
        self.device.trainer(self.rank, "onload")

    def release_cache(self) -> None:
        self.device.trainer(self.rank, "release_cache")


def make(device: Device, rank: int = 0, ranks: int = 1, store: Any = None) -> GpuSharing:
    sync = RankSync(store or HashStore(), rank, ranks, timeout_s=LIMIT_S)
    memory = Memory(device) if rank == 0 else None
    sharing = GpuSharing(
        sync, cast(PolicyBackend, Backend(device, rank)), memory, timeout_s=LIMIT_S
    )
    # Engines, which start afterwards, size their caches by the memory that is free.
    assert device.moves[-2:] == ["connect", "offload"]
    del device.moves[-2:]
    return sharing


def test_a_step_and_its_checkpoint() -> None:
    device = Device()
    sharing = make(device)
    sharing.switch_to(GpuPhase.GENERATING)  # for rollouts: the engines have the GPUs already
    assert device.moves == []
    sharing.switch_to(GpuPhase.TRAINING)
    assert device.moves == ["release cuda_graph+kv_cache+weights", "onload"]
    assert (device.engines, device.trainers) == (set(), {0})
    sharing.switch_to(GpuPhase.HANDOVER)  # to publish into
    assert device.moves[2:] == ["release_cache", "restore weights"]
    sharing.switch_to(GpuPhase.HANDOVER)  # a checkpoint needs nothing more
    assert len(device.moves) == 4
    sharing.switch_to(GpuPhase.GENERATING)
    assert device.moves[4:] == ["offload", "restore cuda_graph+kv_cache"]
    assert (device.engines, device.trainers) == (ALL, set())


def test_a_checkpoint_after_an_evaluation_leaves_the_engines_their_weights() -> None:
    device = Device()
    sharing = make(device)
    sharing.switch_to(GpuPhase.HANDOVER)
    assert device.engines == {"weights"}
    sharing.switch_to(GpuPhase.GENERATING)
    assert device.moves == [
        "release cuda_graph+kv_cache",
        "onload",
        "offload",
        "restore cuda_graph+kv_cache",
    ]


def test_nothing_is_generated_with_weights_that_are_gone() -> None:
    sharing = make(Device())
    sharing.switch_to(GpuPhase.TRAINING)
    with pytest.raises(ValueError, match="generating cannot follow training"):
        sharing.switch_to(GpuPhase.GENERATING)


def test_engines_that_died_start_again_while_the_trainer_is_offloaded() -> None:
    device = Device()
    sharing = make(device)
    sharing.switch_to(GpuPhase.TRAINING)
    device.runs = False  # the last of them died while the trainer had the device
    sharing.switch_to(GpuPhase.HANDOVER)
    assert device.runs
    assert sharing.phase is GpuPhase.HANDOVER
    assert device.moves[2:] == [
        "release_cache",
        "restore weights",
        "offload",
        "restore cuda_graph+kv_cache",
        "release cuda_graph+kv_cache",
        "onload",
    ]


def test_if_no_engine_comes_back_the_trainer_still_gets_the_gpus() -> None:
    """It has a checkpoint to write before the run fails."""
    device = Device()
    device.restarts = False
    sharing = make(device)
    sharing.switch_to(GpuPhase.TRAINING)
    device.runs = False
    sharing.switch_to(GpuPhase.HANDOVER)
    assert sharing.phase is GpuPhase.HANDOVER
    assert device.trainers == {0}
    assert device.moves.count("offload") == 1


def test_a_failure_does_not_change_the_phase() -> None:
    device = Device()
    sharing = make(device)
    sharing.switch_to(GpuPhase.TRAINING)
    memory: Any = sharing._memory
    memory.failure = RunFailed("no engine is left")
    with pytest.raises(RunFailed, match="no engine is left"):
        sharing.switch_to(GpuPhase.HANDOVER)
    assert sharing.phase is GpuPhase.TRAINING
    assert device.trainers == {0}


def test_every_rank_is_out_before_an_engine_takes_memory() -> None:
    """Rank 1 is late with everything; the device itself checks who is there."""
    device = Device()
    store = HashStore()
    # what ranks do in a phase is collective
    late = threading.Event()
    passes = threading.Barrier(2)

    class Slow(Backend):
        def offload(self) -> None:
            late.wait(0.2)
            super().offload()

        def release_cache(self) -> None:
            late.wait(0.2)
            super().release_cache()

    ranks = [make(device, rank, 2, store) for rank in range(2)]
    ranks[1]._backend = cast(PolicyBackend, Slow(device, 1))
    errors: list[BaseException] = []

    def run(sharing: GpuSharing) -> None:
        try:
            for phase in (
                GpuPhase.TRAINING,
                GpuPhase.HANDOVER,
                GpuPhase.GENERATING,
                GpuPhase.HANDOVER,
                GpuPhase.GENERATING,
            ):
                sharing.switch_to(phase)
                passes.wait(LIMIT_S)
        except BaseException as error:  # noqa: BLE001  shown by the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(sharing,)) for sharing in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert errors == []
    assert (device.engines, device.trainers) == (ALL, set())
    assert device.moves.count("offload") == device.moves.count("onload") == 4
