"""Records the samples of steps and evaluations, with their index, in the background."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample
from rlcore.errors import DeadlineExceeded
from rlcore.runs.directory import RunDirectory

# Vectors that a step may compute for each trainable token. Those that exist are recorded;
# `advantages` and the engine's log-probs have columns of their own.
VECTORS = (
    *("logprobs", "entropy", "ref_logprobs", "teacher_logprobs", "values", "returns"),
    *("weights", "correction", "ratio", "clipped"),
)
MAX_UNWRITTEN = 2  # steps and evaluations that wait in memory for the disk
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
        self._timeout_s = collective_timeout_s / 2
        # Unfinished jobs, oldest first, and those whose error nobody has seen.
        self._jobs: deque[tuple[str, Future[None]]] = deque()

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

            vectors = {name: each(batch, name) for name in VECTORS if name in batch.vectors}
            if "logprobs" not in vectors and CHECKED in batch.vectors:
                vectors["logprobs"] = each(batch, CHECKED)
            scalars = write_rollouts(
                self.directory.rollouts_path(step),
                step,
                samples,
                each(batch, "advantages"),
                version=version,
                policy_steps=policy_steps,
                vectors=vectors,
                unscored=unscored,
            )
            write_index(self.directory.index_path(step), step, scalars)
            tables = [*map(self.directory.index_path, range(step - MERGED + 1, step + 1))]
            if step % MERGED == 0 and all(path.is_file() for path in tables):
                merge_tables(self.directory.merged_index / tables[-1].name, tables)
            if self.keep is not None:
                self.directory.prune_rollouts(step, keep=self.keep)

        self.submit(f"recording the samples of step {step}", write)

    def record_evaluation(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the held-out samples of the evaluation after `step`."""

        def write() -> None:
            from rlcore.runs.rollouts import write_rollouts

            self.directory.evaluations.mkdir(exist_ok=True)
            write_rollouts(self.directory.evaluations_path(step), step, samples)

        self.submit(f"recording the evaluation after step {step}", write)

    def submit(self, what: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread after all earlier jobs, none of which may have failed.

        Raises:
            DeadlineExceeded: more than `MAX_UNWRITTEN` jobs are unfinished for too long.
            Exception: the error of an earlier job.
        """
        self._wait(MAX_UNWRITTEN - 1)
        earlier = self._jobs[-1][1] if self._jobs else None
        done: Future[None] = Future()

        def run() -> None:
            try:
                if earlier is not None:
                    earlier.result()
                work()
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - recovery: raised where one waits
                done.set_exception(error)

        self._jobs.append((what, done))
        threading.Thread(target=run, name="recorder", daemon=True).start()

    def finish(self) -> None:
        """Wait until everything recorded is on disk. Raises as `submit` does."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Wait until at most `most` jobs are unfinished."""
        deadline = time.monotonic() + self._timeout_s
        while self._jobs and (len(self._jobs) > most or self._jobs[0][1].done()):
            what, job = self._jobs[0]
            if not wait([job], max(0.0, deadline - time.monotonic())).done:
                raise DeadlineExceeded(
                    f"{what}: not done after {self._timeout_s:g} s (half of"
                    " cluster.collective_timeout_s)"
                )
            job.result()
            self._jobs.popleft()


def each(batch: RolloutBatch, name: str) -> list[NDArray[np.float32]]:
    """Return a vector of the batch split by samples, float32 [m] each."""
    # Slicing numpy arrays takes a tenth of the time of slicing tensors.
    whole = batch.vectors[name].float().numpy()
    return [whole[start:end] for start, end in pairwise(batch.cu_seqlens.tolist())]
