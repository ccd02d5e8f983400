"""Environment variables that say how a process was started. Imports nothing heavy."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

from rlcore.deadlines import REPORT_S
from rlcore.errors import RunFailed

THREADS = "OMP_NUM_THREADS"
# More threads do not speed up the passes over a step's tokens on rank 0.
MAX_THREADS = 16
# Open files of a process besides its connections to other ranks: libraries, shards, engines, logs.
OTHER_FILES = 1024
# The network interface that gloo listens on.
INTERFACE = "GLOO_SOCKET_IFNAME"
# The process id of our own supervisor, which reports how its ranks ended.
SUPERVISED = "RLCORE_SUPERVISOR"
# A file with the configuration that a launcher on this machine has resolved and checked for its
# ranks, whose command lines are masked.
RESOLVED = "RLCORE_RESOLVED"
# Set if Ray restarts the ranks: their engines are running, and some may be lost.
RESTARTED = "RLCORE_RESTARTED"
# The folder of the ranks' store, if all ranks run on this machine (rlcore/stores.py).
STORE_FOLDER = "RLCORE_STORE_FOLDER"


def rank_environment(
    rank: int, world_size: int, *, local_rank: int, local_world_size: int
) -> dict[str, str]:
    """Return the variables that torchrun would set, except the address of the ranks' store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
    }


def is_rank() -> bool:
    """Return whether torchrun or our own supervisor gave this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def supervised() -> bool:
    """Return whether our own supervisor (local, or the Ray driver) started this process."""
    return SUPERVISED in os.environ


def orphaned() -> bool:
    """Return whether the supervisor of this process is gone."""
    return supervised() and os.getppid() != int(os.environ[SUPERVISED])


def resolved_by_launcher() -> Path | None:
    """Return the file with the checked configuration; None if this process must check it.

    A child of a rank may inherit the variable, which is meant for the rank alone.
    """
    path = os.environ.get(RESOLVED)
    return Path(path) if path is not None and supervised() and not orphaned() else None


def started_by_torchrun() -> bool:
    """Return whether torchrun itself started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and not supervised()


def first_on_node() -> bool:
    """Return whether this rank prints errors for its node; all ranks may raise the same error."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_reporter() -> None:
    """Give the reporting rank time to print, before a silent rank exits.

    torchrun ends all ranks as soon as one has exited with an error.
    """
    if started_by_torchrun():
        time.sleep(REPORT_S)


def store_prefix(attempt: int = 0) -> str:
    """Return the prefix of the ranks' keys in the launcher's store, which outlives restarts."""
    return f"rlcore/{attempt}"


def here_key(rank: int) -> str:
    """Return the key, below that prefix, of a rank that waits for the others."""
    return f"here/{rank}"


def threads_at_most() -> int | None:
    """Return this process's share of the cores, for intra-op threads; None if the user sets it.

    torchrun gives each of several processes one thread, too few for rank 0 to prepare a step.
    """
    given = THREADS in os.environ
    if given and (started_by_torchrun() or STORE_FOLDER in os.environ):
        # Both launchers set the variable for their ranks, so look at the launcher's environment.
        with suppress(OSError):
            before = Path(f"/proc/{os.getppid()}/environ").read_bytes()
            given = any(entry.startswith(f"{THREADS}=".encode()) for entry in before.split(b"\0"))
    if given:
        return None
    if not is_rank():
        return cores()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MAX_THREADS, max(1, cores() // ranks))


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files, so that it can hold `count` connections.

    Many systems allow 1024 files and let a process raise the limit. Raises RunFailed if the hard
    limit is too low.
    """
    needed = count + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RunFailed(
            f"this process needs {needed} open files, for {count} connections, and may have {hard}:"
            f" raise the limit of the node (`ulimit -Hn`, LimitNOFILE of its service)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
