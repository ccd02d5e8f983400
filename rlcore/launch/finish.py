"""Trains, and ends the run: export, result, uploads and trackers, whatever the outcome is."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from rlcore.errors import DataError, RunFailed, UserError, exit_code
from rlcore.launch.attempts import mark_ended
from rlcore.launch.process import Process
from rlcore.runs.directory import Status
from rlcore.tracking.hub import push_run
from rlcore.trainer.loop import Trainer
from rlcore.trainer.rank0 import FINISHED, Outcome, RankZero
from rlcore.trainer.rank_sync import in_one_line, on_rank0

logger = logging.getLogger(__name__)


def finish(trainer: Trainer, process: Process) -> Outcome:
    """Train, export, and write the result of the run, also of one that fails."""
    config = trainer.config
    rank0 = trainer.rank0
    folder = Path(config.run.dir) / config.run.name / "hf"
    try:
        with process.reporting_errors():
            outcome = trainer.train()
            if outcome.status in FINISHED and config.checkpoint.export_hf:
                trainer.backend.export_hf(folder)
    except BaseException as error:
        if rank0 is not None:
            status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            if not isinstance(error, UserError):
                _conclude_failed(rank0, status, error)
            rank0.tracker.close(status)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"{error}; free space under {config.run.dir} and continue with --resume"
            ) from error
        raise

    def conclude() -> None:
        on_rank0(rank0).conclude(outcome.status)
        # A rank that is restarted from here on has nothing to do.
        mark_ended(process.sync.store, exit_code(outcome.status))

    process.sync.run_on_rank0("the result of the run", conclude)
    # The other ranks leave meanwhile: an upload can take longer than they would wait.
    if rank0 is not None:
        if process.heartbeat is not None:
            process.heartbeat.ignore_peers()
        if outcome.status in FINISHED and config.tracking.hub.repo:
            push_run(config.tracking.hub, folder, rank0.directory, rank0.tracker)
        rank0.tracker.close(outcome.status)
    return outcome


def _conclude_failed(rank0: RankZero, status: Status, error: BaseException) -> None:
    try:
        rank0.conclude(status, reason=in_one_line(error))
    # A full disk or damaged metrics: the user must hear the first error, not this one.
    except (OSError, DataError) as second:
        logger.error("result.json could not be written: %s", second)
