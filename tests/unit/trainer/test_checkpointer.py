"""Checkpoints in the background, as the ranks wait for them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from backends.megatron.cpu.shim import importing_megatron
from rlcore.errors import DeadlineExceeded, RunFailed
from rlcore.interfaces import PolicyBackend
from rlcore.trainer.checkpointer import Checkpointer, folder_inside
from rlcore.trainer.loop import Trainer
from rlcore.trainer.rank0 import RankZero
from rlcore.trainer.rank_sync import RankSync

with importing_megatron():
    from backends.megatron.checkpoint.shards import PendingCheckpoint


LIMIT_S = 60.0


class Writing:
    """A backend that writes until it is told to have written."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.calls: list[str] = []

    def start_save(self, folder: Path) -> None:
        self.calls.append("start")

    def save(self, folder: Path) -> None:
        self.calls.append("save")

    def save_seconds(self) -> float | None:
        return self.seconds

    def finish_save(self) -> None:
        self.calls.append("finish")

    def load(self, folder: Path) -> None:
        self.calls.append("load")


class RecordingRankZero:
    """Records which checkpoints were begun and committed."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.committed: list[int] = []

    def begin_checkpoint(self, step: int) -> Path:
        self.begun.append(step)
        return Path("model")

    def commit_checkpoint(self, step: int) -> None:
        self.committed.append(step)


Parts = tuple[Checkpointer, Writing, RecordingRankZero]


def make_parts(*, timeout_s: float) -> Parts:
    backend = Writing()
    rank0 = RecordingRankZero()
    sync = RankSync(HashStore(), 0, 1, timeout_s=timeout_s)
    checkpointer = Checkpointer(sync, cast(PolicyBackend, backend), cast(RankZero, rank0), Path())
    return checkpointer, backend, rank0


@pytest.fixture
def parts() -> Parts:
    return make_parts(timeout_s=LIMIT_S)


def test_it_is_committed_at_the_end_of_the_step_in_which_it_was_written(parts: Parts) -> None:
    checkpointer, backend, rank0 = parts
    assert checkpointer.save(3, in_background=True) is None
    assert checkpointer.poll() is None
    assert checkpointer.is_writing
    assert (rank0.begun, rank0.committed) == ([3], [])
    backend.seconds = 1.5
    assert checkpointer.poll() == 1.5
    assert not checkpointer.is_writing
    assert rank0.committed == [3]
    assert backend.calls == ["start", "finish"]
    assert checkpointer.poll() is None


def test_it_took_as_long_as_the_slowest_rank() -> None:
    store = HashStore()
    slowness = (1.5, 4.0, 2.5)

    def run(rank: int) -> float | None:
        backend = Writing()
        backend.seconds = slowness[rank]
        checkpointer = Checkpointer(
            RankSync(store, rank, len(slowness), timeout_s=LIMIT_S),
            cast(PolicyBackend, backend),
            cast(RankZero, RecordingRankZero()) if rank == 0 else None,
            Path(),
        )
        checkpointer.save(3, in_background=True)
        return checkpointer.poll()

    with ThreadPoolExecutor(len(slowness)) as ranks:
        assert next(iter(ranks.map(run, range(len(slowness))))) == 4.0


def test_a_second_save_waits_for_the_first(parts: Parts) -> None:
    checkpointer, backend, rank0 = parts
    checkpointer.save(3, in_background=True)
    threading.Timer(0.05, lambda: setattr(backend, "seconds", 2.0)).start()
    assert checkpointer.save(4, in_background=True) == 2.0
    assert (rank0.begun, rank0.committed) == ([3, 4], [3])


def test_but_not_for_ever() -> None:
    checkpointer, _, rank0 = make_parts(timeout_s=0.2)
    checkpointer.save(3, in_background=True)
    with pytest.raises(
        DeadlineExceeded,
        match=r"rank 0 waited 0 s for .*step 3 to be written; cluster.collective_timeout_s",
    ):
        checkpointer.save(4, in_background=True)
    assert rank0.begun == [3]


SAVED = "the run is saved after step 3: continue with --resume"


def test_before_a_run_fails_its_last_step_is_saved(parts: Parts) -> None:
    checkpointer, backend, rank0 = parts
    checkpointer.save(2, in_background=False)
    assert checkpointer.save_before_failing(3) == SAVED
    assert rank0.committed == [2, 3]
    assert checkpointer.save_before_failing(3) == SAVED
    assert backend.calls == ["save", "save"], "once is enough"


def test_before_a_run_fails_the_checkpoint_in_the_background_is_committed(parts: Parts) -> None:
    checkpointer, backend, rank0 = parts
    checkpointer.save(3, in_background=True)
    threading.Timer(0.05, lambda: setattr(backend, "seconds", 2.0)).start()
    assert checkpointer.save_before_failing(3) == SAVED
    assert (rank0.begun, rank0.committed) == ([3], [3])


def test_a_run_that_trained_nothing_has_nothing_to_save(parts: Parts) -> None:
    checkpointer, backend, rank0 = parts
    assert checkpointer.save_before_failing(0) == "no step was trained yet"
    checkpointer.newest = 3  # as after a resume
    assert checkpointer.save_before_failing(3) == SAVED
    assert (rank0.begun, backend.calls) == ([], [])


def test_any_rank_says_what_is_intact(tmp_path: Path) -> None:
    """The first rank that fails speaks for all."""
    checkpoints = tmp_path / "checkpoints"
    store = HashStore()
    (checkpoints / "step_000002").mkdir(parents=True)
    store.set("sync/1", str(checkpoints / ".step_000004.tmp" / "model"))  # rank 0 has opened it

    class FullDisk(Writing):
        def save(self, folder: Path) -> None:
            raise RunFailed(f"writing {folder}: No space left on device")

    checkpointer = Checkpointer(
        RankSync(store, 1, 2, timeout_s=0.2), cast(PolicyBackend, FullDisk()), None, checkpoints
    )
    with pytest.raises(RunFailed) as caught:
        checkpointer.save(4, in_background=False)
    assert (
        str(caught.value) == "the checkpoint of step 4 could not be written: writing"
        f" {checkpoints}/.step_000004.tmp/model: No space left on device; the checkpoint of step"
        f" 2 is intact; free space under {checkpoints} and continue with --resume"
    )


class Endless:
    """A part of a checkpoint that is written until it is cancelled."""

    def write(self, cancelled: threading.Event) -> None:
        if not cancelled.wait(LIMIT_S):
            raise AssertionError("nobody cancelled")
        raise RunFailed("given up")


def test_a_run_that_ends_leaves_no_thread_behind() -> None:
    before = threading.enumerate()
    pending = PendingCheckpoint(Path("folder"), cast(Any, [Endless()]), lambda: None)
    assert pending.written() is None
    began = time.monotonic()
    pending.cancel()
    assert time.monotonic() - began < LIMIT_S / 2
    assert set(threading.enumerate()) <= set(before), "of which some may have ended"
    with pytest.raises(RunFailed, match="given up"):
        pending.written()


def test_the_error_of_the_thread_is_told_in_one_line() -> None:
    class Failing:
        def write(self, cancelled: threading.Event) -> None:
            raise OSError(28, "No space left on device")

    pending = PendingCheckpoint(Path("/runs/x/model"), cast(Any, [Failing()]), lambda: None)
    pending.cancel()
    with pytest.raises(RunFailed, match=r"^writing /runs/x/model: .*No space left on device$"):
        pending.written()


@pytest.mark.parametrize("folder", ["run/checkpoints/step_000003/model", "given/model", "given"])
def test_a_folder_of_the_run_may_be_loaded(tmp_path: Path, folder: str) -> None:
    allowed = [tmp_path / "run" / "checkpoints", tmp_path / "given"]
    assert folder_inside(allowed, str(tmp_path / folder)) == tmp_path / folder


@pytest.mark.parametrize(
    "folder", ["elsewhere", "run/checkpoints/../../elsewhere", "run/checkpoints-2", "run"]
)
def test_a_folder_that_a_stranger_names_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(RunFailed, match="another process writes to this run's store"):
        folder_inside([tmp_path / "run" / "checkpoints"], str(tmp_path / folder))


def test_a_stranger_in_the_store_does_not_choose_where_a_rank_writes(tmp_path: Path) -> None:
    store = HashStore()
    store.set("sync/1", str(tmp_path / "elsewhere"))  # before rank 0 has spoken
    sync = RankSync(store, 1, 2, timeout_s=5)
    backend = Writing()
    checkpointer = Checkpointer(sync, cast(PolicyBackend, backend), None, tmp_path / "checkpoints")
    with pytest.raises(RunFailed, match="elsewhere"):
        checkpointer.save(3, in_background=False)
    assert backend.calls == []


def test_a_stranger_in_the_store_does_not_choose_what_a_rank_resumes_from(tmp_path: Path) -> None:
    store = HashStore()
    store.set("sync/1", str(tmp_path / "elsewhere"))  # before rank 0 has spoken
    backend = Writing()
    rank = SimpleNamespace(
        sync=RankSync(store, 1, 2, timeout_s=5),
        rank0=None,
        replay_from=None,
        backend=backend,
        checkpoints=tmp_path / "checkpoints",
    )
    with pytest.raises(RunFailed, match="elsewhere"):
        Trainer.resume(cast(Trainer, rank))
    assert backend.calls == []
