"""Checkpoints: every rank writes its shards, rank 0 its state, and one rename commits them.

A checkpoint in the background copies the state of a step to host memory; training goes on while
threads write the copy. Rank 0 writes its own state first, so both are of one step. After each later
step the ranks report their progress to rank 0, which commits when all have written. Until then the
earlier checkpoint is the newest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlcore.errors import RunFailed
from rlcore.interfaces import PolicyBackend
from rlcore.runs.checkpoints import write_failure
from rlcore.trainer.rank0 import RankZero
from rlcore.trainer.rank_sync import RankSync, on_rank0

COMMIT = "commit"
WAIT = "wait"
STILL_WRITING = json.dumps({"seconds": None})  # a rank's report until it has written everything


def folder_inside(allowed: Sequence[Path], folder: str) -> Path:
    """The folder that another process has named, if it is one of `allowed` or inside of one.

    Whoever reaches the store could name any other, whose pickles would be loaded.

    Raises RunFailed else.
    """
    there = Path(os.path.abspath(folder))  # without "..", links as they are
    if not any(there.is_relative_to(os.path.abspath(one)) for one in allowed):
        raise RunFailed(
            f"rank 0's answer names the folder {folder!r}, expected one inside"
            f" {' or '.join(map(str, allowed))}: another process writes to this run's store"
        )
    return there


class Checkpointer:
    """Saves checkpoints. All ranks call every method in the same order.

    A failure is RunFailed on every rank; its message names the checkpoint that is intact.

    Args:
        rank0: on rank 0.
        checkpoints: the run's folder of checkpoints; no other one is written to.
    """

    def __init__(
        self, sync: RankSync, backend: PolicyBackend, rank0: RankZero | None, checkpoints: Path
    ) -> None:
        self._sync = sync
        self._backend = backend
        self._rank0 = rank0
        self._checkpoints = checkpoints
        self.newest = 0  # step of the newest checkpoint, whole or being written; 0: there is none
        self._step: int | None = None  # of the checkpoint that is being written
        self._folder = Path()  # of the newest shards: checkpoints/<step>/model
        self._slowest = 0.0  # seconds that the slowest rank wrote for (rank 0)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._step is not None

    def save(self, step: int, *, in_background: bool) -> float | None:
        """Save `step`. A checkpoint that is still being written is completed first.

        Returns:
            The seconds that this earlier one took, as `poll` does.
        """
        seconds = self._wait()
        folder = self._sync.broadcast(
            "opening a checkpoint", lambda: str(on_rank0(self._rank0).begin_checkpoint(step))
        )
        self._folder = folder_inside([self._checkpoints], folder)
        with self._naming_what_is_intact(step):
            if in_background:
                self._backend.start_save(self._folder)
            else:
                self._backend.save(self._folder)
        if in_background:
            self._step = step
        else:
            self._commit(step)
        self.newest = step
        return seconds

    def save_before_failing(self, step: int) -> str:
        """Save the last trained step, unless it is saved. Returns what to tell the user."""
        if step == self.newest:
            self._wait()
        else:
            self.save(step, in_background=False)
        return (
            f"the run is saved after step {step}: continue with --resume"
            if step
            else "no step was trained yet"
        )

    def poll(self) -> float | None:
        """Commit the checkpoint that is being written, if every rank has written it.

        Returns:
            The seconds of the slowest rank (on rank 0). None if nothing is being written, or not
            all ranks have finished.

        Raises:
            RunFailed: a rank could not write.
        """
        if self._step is None:
            return None
        reports = self._sync.gather("the state of the checkpoint", self._progress())
        decision = self._sync.broadcast(
            "whether to commit the checkpoint", lambda: self._decide(reports)
        )
        if decision == WAIT:
            return None
        step = self._step
        self._step = None
        with self._naming_what_is_intact(step):
            self._backend.finish_save()
        self._commit(step)
        return self._slowest

    def _wait(self) -> float | None:
        """Wait until the checkpoint that is being written is committed. Returns as `poll` does."""
        if self._step is None:
            return None
        what = (
            f"its part of the checkpoint of step {self._step} to be written;"
            " cluster.collective_timeout_s is the limit"
        )
        self._sync.wait_until(lambda: self._progress() != STILL_WRITING, what)
        return self.poll()

    def _progress(self) -> str:
        """Report to rank 0 how far this rank is."""
        try:
            return json.dumps({"seconds": self._backend.save_seconds()})
        except RunFailed as error:
            return json.dumps({"error": str(error)})

    def _decide(self, reports: Sequence[str]) -> str:
        """Return `COMMIT` or `WAIT` from every rank's report (rank 0).

        Raises:
            RunFailed: a rank could not write.
        """
        assert self._step is not None
        for rank, report in enumerate(reports):
            if "error" in (said := json.loads(report)):
                raise self._failure(self._step, RunFailed(f"rank {rank}: {said['error']}"))
        if STILL_WRITING in reports:
            return WAIT
        self._slowest = max(json.loads(report)["seconds"] for report in reports)
        return COMMIT

    def _commit(self, step: int) -> None:
        self._sync.run_on_rank0(
            "committing a checkpoint", lambda: on_rank0(self._rank0).commit_checkpoint(step)
        )

    @contextmanager
    def _naming_what_is_intact(self, step: int) -> Iterator[None]:
        """Around the writing of shards: any rank may be the first to report a failure."""
        try:
            yield
        except RunFailed as error:
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: RunFailed) -> RunFailed:
        """Make the error to raise. Rank 0 also deletes what was written of `step`."""
        failure = write_failure(self._folder.parents[1], step, error)
        if self._rank0 is not None:
            self._rank0.checkpoints.abort(step)
        return failure
