"""One rank of a run, from joining the others to its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.config.load import Loaded
from rlcore.errors import FAILED, RunFailed, exit_code
from rlcore.launch.environment import supervised, wait_for_speaker

if TYPE_CHECKING:
    from rlcore.launch.compose import OpenService


def train_rank(
    loaded: Loaded, *, resume: bool, overwrite: bool, service: OpenService | None = None
) -> int:
    """One rank of a run, from joining the others to its exit code.

    Args:
        service: how rank 0 opens the rollout service; default: in this process.
    """
    from rlcore.launch.attempts import RunHasEnded
    from rlcore.launch.compose import run_rank
    from rlcore.launch.logs import describe
    from rlcore.launch.process import join
    from rlcore.trainer.rank_sync import PeerFailed

    rank = 0
    try:
        with join(loaded.config) as process:
            # --overwrite has done its work then
            rank = process.rank
            goes_on = process.attempt.goes_on
            outcome = run_rank(
                process,
                loaded,
                resume=resume or goes_on,
                overwrite=overwrite and not goes_on,
                service=service,
            )
    except RunHasEnded as ended:
        return ended.code
    except PeerFailed as error:
        if rank != 0 or supervised():  # somebody else tells the user
            wait_for_speaker()
            return FAILED
        raise RunFailed(describe(error.failure, loaded.config.run)) from error
    return exit_code(outcome.status)
