"""Records the samples of steps and evaluations, with their index, in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample
from rlcore.errors import DeadlineExceeded
from rlcore.runs.directory import RunDirectory

logger = logging.getLogger(__name__)

# Vectors that a step may compute for each trainable token. Those that exist are recorded;
# `advantages` and the engine's log-probs have columns of their own.
VECTORS = (
    *("logprobs", "entropy", "ref_logprobs", "teacher_logprobs", "values", "returns"),
    *("weights", "correction", "ratio", "clipped"),
)
MAX_UNWRITTEN = 2  # steps and evaluations that wait in memory for the disk
Job = tuple[str, Callable[[], None]]
CHECKED = "checked_logprobs"  # the trainer's log-probs, if only the engine check computed them


class RolloutRecorder:
    """Writes rollouts/, evaluations/ and index/ of a run while training continues.

    A disk error is raised at the next step, or by `finish`.

    Args:
        keep: how many of the newest steps stay on disk; None keeps all.
        collective_timeout_s: how long other ranks wait for rank 0; writing may take half as long.
    """

    def __init__(
        self, directory: RunDirectory, *, keep: int | None, collective_timeout_s: float
    ) -> None:
        self.directory = directory
        self.keep = keep
        self._background = Background(
            "recorder",
            most=MAX_UNWRITTEN,
            timeout_s=collective_timeout_s / 2,
            limit="half of cluster.collective_timeout_s",
        )

    def begin(self, step: int) -> None:
        """Delete the recordings of steps after `step`."""
        self.directory.rewind(step)

    def record(
        self,
        step: int,
        samples: Sequence[Sample],
        batch: RolloutBatch,
        *,
        unscored: Sequence[Sample] = (),
        version: int | None,
        policy_steps: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Write the samples of `step` with the vectors that they were trained with.

        Args:
            batch: its vectors must not change any more.
            unscored: samples that were not trained on because their reward failed.
            version, policy_steps: as in `write_rollouts`.
        """

        def write() -> None:
            # Import PyArrow only where samples are recorded, not on every rank.
            from rlcore.runs.rollouts import write_rollouts
            from rlcore.runs.sample_index import MERGED, merge_tables, write_index

            scalars = write_rollouts(
                self.directory.rollouts_path(step),
                step,
                samples,
                each(batch, "advantages"),
                version=version,
                policy_steps=policy_steps,
                vectors=vectors_of(batch),
                unscored=unscored,
            )
            write_index(self.directory.index_path(step), step, scalars)
            tables = [*map(self.directory.index_path, range(step - MERGED + 1, step + 1))]
            if step % MERGED == 0 and all(path.is_file() for path in tables):
                merge_tables(self.directory.merged_index / tables[-1].name, tables)
            if self.keep is not None:
                self.directory.prune_rollouts(step, keep=self.keep)

        self._background.submit(f"recording the samples of step {step}", write)

    def record_evaluation(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the held-out samples of the evaluation after `step`."""

        def write() -> None:
            from rlcore.runs.rollouts import write_rollouts

            self.directory.evaluations.mkdir(exist_ok=True)
            write_rollouts(self.directory.evaluations_path(step), step, samples)

        self._background.submit(f"recording the evaluation after step {step}", write)

    def finish(self) -> None:
        """Wait until everything recorded is on disk.

        Raises:
            DeadlineExceeded: writing takes too long.
            OSError: writing failed.
        """
        self._background.finish()

    def finish_if_possible(self) -> None:
        """Call `finish` at the end of a failed run: an error is logged, not raised."""
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - recovery: the run has failed anyway
            logger.error("the last samples were not recorded: %s", error)


def vectors_of(batch: RolloutBatch) -> dict[str, list[NDArray[np.float32]]]:
    """Return the recorded vectors of each sample, by name."""
    found = {name: each(batch, name) for name in VECTORS if name in batch.vectors}
    if "logprobs" not in found and CHECKED in batch.vectors:
        found["logprobs"] = each(batch, CHECKED)
    return found


def each(batch: RolloutBatch, name: str) -> list[NDArray[np.float32]]:
    """Return a vector of the batch split by samples, float32 [m] each."""
    # Slicing numpy arrays takes a tenth of the time of slicing tensors.
    whole = batch.vectors[name].float().numpy()
    return [whole[start:end] for start, end in pairwise(batch.cu_seqlens.tolist())]


class Background:
    """Runs jobs one after another in a thread, which ends when no job is left.

    After a failure no further job runs: the next `submit` or `finish` raises the error.

    Args:
        most: how many jobs may be unfinished; beyond that `submit` waits for the oldest.
        timeout_s: limit of a wait.
        limit: the origin of `timeout_s`, for the error message.
    """

    def __init__(self, name: str, *, most: int, timeout_s: float, limit: str) -> None:
        self._name = name
        self._most = most
        self._timeout_s = timeout_s
        self._limit = limit
        # The first job is running.
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def submit(self, what: str, work: Callable[[], None]) -> None:
        """Run `work` in the background, after all earlier jobs.

        Raises:
            DeadlineExceeded: earlier jobs take too long.
            BaseException: the error of an earlier job.
        """
        with self._changed:
            self._wait_until_left(self._most - 1)
            self._jobs.append((what, work))
            if len(self._jobs) == 1:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def finish(self) -> None:
        """Wait until all jobs are done. Raises as `submit` does."""
        with self._changed:
            self._wait_until_left(0)

    def _wait_until_left(self, most: int) -> None:
        ended = self._changed.wait_for(
            lambda: self._failure is not None or len(self._jobs) <= most, self._timeout_s
        )
        if not ended:
            what, _ = self._jobs[0]
            raise DeadlineExceeded(f"{what}: not done after {self._timeout_s:g} s ({self._limit})")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        job = self._jobs[0]
        while True:
            failure: BaseException | None = None
            try:
                job[1]()
            except BaseException as error:  # noqa: BLE001 - recovery: raised where one waits
                failure = error
            with self._changed:
                self._failure = failure
                self._jobs.popleft()
                self._changed.notify_all()
                if failure is not None or not self._jobs:
                    return
                job = self._jobs[0]
