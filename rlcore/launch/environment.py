"""The environment, which says how a process was started. Imports nothing heavy."""

from __future__ import annotations

import os
import time

from rlcore.deadlines import SPEAKER_S

# The process id of our own supervisor, which tells the user how its ranks ended.
SUPERVISED = "RLCORE_SUPERVISOR"


def torchrun_environment(
    rank: int, world_size: int, *, local_rank: int, local_world_size: int, host: str, port: int
) -> dict[str, str]:
    """The variables that torchrun would set, for a rank whose store our supervisor has."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # The store is the supervisor's, so no rank chooses a port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def under_torchrun() -> bool:
    """Whether this process was told its rank, by torchrun or by our own supervisor."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def supervised() -> bool:
    """Whether our own supervisor (local, or the Ray driver) started this process."""
    return SUPERVISED in os.environ


def orphaned() -> bool:
    """Whether the supervisor of this process is gone."""
    return supervised() and os.getppid() != int(os.environ[SUPERVISED])


def started_by_torchrun() -> bool:
    """Whether torchrun itself started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and not supervised()


def first_on_node() -> bool:
    """Whether this rank prints errors for its node: all ranks may meet the same one."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_reporter() -> None:
    """Give the reporting rank time to print, before a silent rank exits.

    torchrun ends all ranks as soon as one has exited with an error.
    """
    if started_by_torchrun():
        time.sleep(SPEAKER_S)


def store_prefix(attempt: int = 0) -> str:
    """The prefix of the ranks' keys in the launcher's store, which torchrun keeps over restarts."""
    return f"rlcore/{attempt}"


def here_key(rank: int) -> str:
    """The key under that prefix which says that a rank waits for the others."""
    return f"here/{rank}"
