"""Checkpoints as one rank makes them: every rank's shards beside rank 0's state, committed by one
rename.

In the background, a step's state is copied to host memory, and while threads write the copy
training goes on. Rank 0's state is written before, so both are of one step. At each later step's
border the ranks tell rank 0 through the store how far they are; when all have written, it commits.
Until then the checkpoint before is the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlcore.errors import RunFailed
from rlcore.interfaces import PolicyBackend
from rlcore.runs.checkpoints import write_failure
from rlcore.trainer.rank0 import RankZero
from rlcore.trainer.rank_sync import RankSync

COMMIT = "commit"
WAIT = "wait"
GOING_ON = json.dumps({"seconds": None})  # what a rank says that has not written everything


class Checkpointer:
    """Every method is called by all ranks, in the same order; a failure is RunFailed and names what
    is intact, on every rank.

    Args:
        rank0: on rank 0.
        timeout_s: how long one rank waits for another, and all of them for a checkpoint on its way.
    """

    def __init__(
        self, sync: RankSync, backend: PolicyBackend, rank0: RankZero | None, *, timeout_s: float
    ) -> None:
        self._sync = sync
        self._backend = backend
        self._rank0 = rank0
        self._timeout_s = timeout_s
        # step of the newest checkpoint, whole or being written; 0: there is none
        self.newest = 0
        self._step: int | None = None  # of the checkpoint that is being written
        self._folder = Path()  # of the newest shards, inside that of all checkpoints
        self._slowest = 0.0  # seconds that its last rank wrote for (rank 0)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk."""
        return self._step is not None

    def save(self, step: int, *, in_background: bool) -> float | None:
        """Save `step`, after the checkpoint that is on its way, if any. Returns what `poll` would
        of that one.
        """
        seconds = self._wait()
        self._folder = Path(
            self._sync.broadcast(
                "opening a checkpoint",
                lambda: str(self._main.begin_checkpoint(step)),
                timeout_s=self._timeout_s,
            )
        )
        with self._explained(step):
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

    def keep(self, step: int) -> str:
        """See that a checkpoint holds `step`, the last that was trained, before the run fails. Says
        what is kept.
        """
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
        """Commit the checkpoint on its way if every rank has written it. Returns the slowest rank's
        seconds (on rank 0).

        None where none is on its way, or not all have written. Raises RunFailed where a rank could
        not write.
        """
        if self._step is None:
            return None
        words = self._sync.gather(
            "the state of the checkpoint", self._progress(), timeout_s=self._timeout_s
        )
        verdict = self._sync.broadcast(
            "whether to commit the checkpoint",
            lambda: self._judge(words),
            timeout_s=self._timeout_s,
        )
        if verdict == WAIT:
            return None
        step = self._step
        self._step = None
        with self._explained(step):
            self._backend.finish_save()
        self._commit(step)
        return self._slowest

    def _wait(self) -> float | None:
        """Until the checkpoint on its way is committed; what `poll` returned."""
        if self._step is None:
            return None
        what = (
            f"its part of the checkpoint of step {self._step} to be written;"
            " cluster.collective_timeout_s is the limit"
        )
        self._sync.wait_until(lambda: self._progress() != GOING_ON, what, timeout_s=self._timeout_s)
        return self.poll()

    def _progress(self) -> str:
        """How far this rank is, for rank 0."""
        try:
            return json.dumps({"seconds": self._backend.save_seconds()})
        except RunFailed as error:
            return json.dumps({"error": str(error)})

    def _judge(self, words: Sequence[str]) -> str:
        """On rank 0, from every rank's `_progress`: `COMMIT` or `WAIT`. Raises RunFailed with what
        a rank could not do.
        """
        assert self._step is not None
        told = [json.loads(word) for word in words]
        for rank, report in enumerate(told):
            if "error" in report:
                raise self._main.checkpoint_failure(
                    self._step, RunFailed(f"rank {rank}: {report['error']}")
                )
        if GOING_ON in words:
            return WAIT
        self._slowest = max(report["seconds"] for report in told)
        return COMMIT

    def _commit(self, step: int) -> None:
        self._sync.run_on_rank0(
            "committing a checkpoint",
            lambda: self._main.commit_checkpoint(step),
            timeout_s=self._timeout_s,
        )

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Around what writes shards: the failure says what is intact, whichever rank is the first
        to tell of it.

        Rank 0 deletes what was written.
        """
        try:
            yield
        except RunFailed as error:
            if self._rank0 is None:
                raise write_failure(self._folder.parents[1], step, error) from error
            raise self._rank0.checkpoint_failure(step, error) from error

    @property
    def _main(self) -> RankZero:
        assert self._rank0 is not None, "only rank 0 has it"
        return self._rank0
