"""What the environment says about this process's place. Imports nothing heavy."""

from __future__ import annotations

import os
import time

SPEAKER_S = 10.0
# process id of our own supervisor, who tells the user how its ranks ended
SUPERVISED = "RLCORE_SUPERVISOR"


def under_torchrun() -> bool:
    """True when somebody (torchrun, or our own supervisor) has told this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def supervised() -> bool:
    return SUPERVISED in os.environ


def orphaned() -> bool:
    return supervised() and os.getppid() != int(os.environ[SUPERVISED])


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and not supervised()


def first_on_node() -> bool:
    """Whether this process speaks on the terminal of its node: ranks that meet the same error say
    it once.
    """
    return os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_speaker() -> None:
    """Before a rank that says nothing ends: torchrun then ends all, and with them the one that
    tells the user why.
    """
    if started_by_torchrun():
        time.sleep(SPEAKER_S)


def store_prefix(attempt: int = 0) -> str:
    """Keys of the ranks in the launcher's store; torchrun keeps it over restarts."""
    return f"rlcore/{attempt}"


def here_key(rank: int) -> str:
    """Under that prefix: a rank waits there for the others."""
    return f"here/{rank}"
