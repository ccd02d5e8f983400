"""Runs one rank, from joining the others to its exit code; the same for every launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.config.load import Loaded
from rlcore.errors import FAILED, RunFailed, exit_code
from rlcore.launch.environment import supervised, wait_for_reporter

if TYPE_CHECKING:
    from rlcore.launch.compose import OpenService


def train_rank(
    loaded: Loaded, *, resume: bool, overwrite: bool, service: OpenService | None = None
) -> int:
    """Train as the rank that the environment names, or as the only one; return its exit code.

    Args:
        service: opens the rollout service on rank 0; default: in this process.
    """
    from rlcore.launch.attempts import RunHasEnded
    from rlcore.launch.compose import run_rank
    from rlcore.launch.logs import describe_failure
    from rlcore.launch.process import join
    from rlcore.trainer.rank_sync import PeerFailed

    rank = 0
    try:
        with join(loaded.config) as process:
            rank = process.rank
            resumes = process.attempt.resumes
            outcome = run_rank(
                process,
                loaded,
                resume=resume or resumes,
                overwrite=overwrite and not resumes,  # the first attempt has done it
                service=service,
            )
    except RunHasEnded as ended:
        return ended.code
    except PeerFailed as error:
        if rank != 0 or supervised():  # another process tells the user
            wait_for_reporter()
            return FAILED
        raise RunFailed(describe_failure(error.failure, loaded.config.run)) from error
    return exit_code(outcome.status)
