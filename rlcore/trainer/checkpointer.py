"""Checkpoints: every rank writes its shards, rank 0 its state, and one rename commits them.

A background checkpoint copies the state of a step to host memory; threads write the copy while
training continues. Rank 0 writes its own state first, so both belong to the same step. After each
later step the ranks report their progress, and rank 0 commits once all of them have written. Until
then the previous checkpoint is the newest.
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

STILL_WRITING = json.dumps({"seconds": None})  # a rank's report until all its shards are written


def folder_inside(allowed: Sequence[Path], folder: str) -> Path:
    """Return the folder named by another process, if it lies in one of `allowed`.

    Anybody who can reach the store could name a different folder, whose pickles would be loaded.

    Raises:
        RunFailed: the folder is outside of `allowed`.
    """
    # Remove ".." but keep links as they are.
    there = Path(os.path.abspath(folder))
    if not any(there.is_relative_to(os.path.abspath(parent)) for parent in allowed):
        raise RunFailed(
            f"rank 0's answer names the folder {folder!r}, expected one inside"
            f" {' or '.join(map(str, allowed))}: another process writes to this run's store"
        )
    return there


class Checkpointer:
    """Saves checkpoints. All ranks call every method in the same order.

    A failure is RunFailed on every rank; its message names the checkpoint that is intact.

    Args:
        rank0: given on rank 0 only.
        checkpoints: the run's checkpoint folder, the only one that is written to.
    """

    def __init__(
        self, sync: RankSync, backend: PolicyBackend, rank0: RankZero | None, checkpoints: Path
    ) -> None:
        self._sync = sync
        self._backend = backend
        self._rank0 = rank0
        self._checkpoints = checkpoints
        # Step of the newest checkpoint, whether complete or being written; 0 without one.
        self.newest = 0
        # Step of the checkpoint that is being written.
        self._step: int | None = None
        # Folder of the newest shards: checkpoints/<step>/model.
        self._folder = Path()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._step is not None

    def save(self, step: int, *, in_background: bool) -> float | None:
        """Save `step`. A checkpoint that is still being written is completed first.

        Returns:
            The seconds that the earlier checkpoint took, as in `poll`.
        """
        seconds = self._wait()
        folder = self._sync.broadcast(
            "opening a checkpoint", lambda: str(on_rank0(self._rank0).begin_checkpoint(step))
        )
        self._folder = folder_inside([self._checkpoints], folder)
        with self._naming_intact_checkpoint(step):
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
        """Save the last trained step, unless it is saved. Returns the advice for the user."""
        if step == self.newest:
            self._wait()
        else:
            self.save(step, in_background=False)
        saved = f"the run is saved after step {step}: continue with --resume"
        return saved if step else "no step was trained yet"

    def poll(self) -> float | None:
        """Commit the checkpoint that is being written, if every rank has written it.

        Returns:
            The seconds of the slowest rank. None if nothing is being written, or some rank has not
            finished.

        Raises:
            RunFailed: a rank could not write.
        """
        if self._step is None:
            return None
        step = self._step
        reports = self._sync.gather("the state of the checkpoint", self._progress())

        def slowest() -> str:
            for rank, report in enumerate(reports):
                if "error" in (said := json.loads(report)):
                    raise self._failure(step, RunFailed(f"rank {rank}: {said['error']}"))
            if STILL_WRITING in reports:
                return ""
            return str(max(json.loads(report)["seconds"] for report in reports))

        seconds = self._sync.broadcast("whether to commit the checkpoint", slowest)
        if not seconds:
            return None
        self._step = None
        with self._naming_intact_checkpoint(step):
            self._backend.finish_save()
        self._commit(step)
        return float(seconds)

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
        """Return this rank's progress as a report to rank 0."""
        try:
            return json.dumps({"seconds": self._backend.save_seconds()})
        except RunFailed as error:
            return json.dumps({"error": str(error)})

    def _commit(self, step: int) -> None:
        self._sync.run_on_rank0(
            "committing a checkpoint", lambda: on_rank0(self._rank0).commit_checkpoint(step)
        )

    @contextmanager
    def _naming_intact_checkpoint(self, step: int) -> Iterator[None]:
        """Add the intact checkpoint to the errors of writing shards; any rank may fail first."""
        try:
            yield
        except RunFailed as error:
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: RunFailed) -> RunFailed:
        """Return the error to raise. Rank 0 also deletes the files written for `step`."""
        failure = write_failure(self._folder.parents[1], step, error)
        if self._rank0 is not None:
            self._rank0.checkpoints.abort(step)
        return failure
