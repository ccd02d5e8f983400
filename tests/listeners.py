"""What a tree of processes listens on, from /proc, against the table of docs/ports.md."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

EVERYWHERE = "::"
PORTS = Path(__file__).resolve().parents[1] / "docs" / "ports.md"
# the processes of runs, by their command line, the first that fits; names as in the table
PROGRAMS = (
    ("torchrun agent", r"rlcore\.launch\.torchrun|torch\.distributed\.run"),
    ("rollout service", r"rlcore\.launch\.service\.child"),
    ("trainer rank", r"rlcore(\.launch\.process)? train|rank_driver|-m rlcore |ray::Rank"),
    ("embedded engine", r"rollout\.engines\.embedded\.server"),
    ("SGLang server", r"sglang/entry\.py"),
    ("SGLang scheduler", r"^sglang::|multiprocessing\.(spawn|forkserver|resource_tracker)"),
    ("Ray itself", r"raylet|gcs_server|^ray::|ray/_private|ray/dashboard"),
)


def tree(*pids: int) -> list[psutil.Process]:
    """Some processes and all below them that are there still."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            top = psutil.Process(pid)
            found |= {one.pid: one for one in (top, *top.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def listening(*pids: int) -> dict[str, set[str]]:
    """The addresses on which each program below some processes listens, by its command line."""
    found: dict[str, set[str]] = {}
    for process in tree(*pids):
        try:
            addresses = [
                connection.laddr.ip
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
            name = " ".join(process.cmdline())
            joined_ray = joins_ray(process)
        except psutil.NoSuchProcess:
            continue
        if joined_ray and EVERYWHERE in addresses:
            # one is Ray's own, as in all processes that join a cluster
            addresses.remove(EVERYWHERE)
        if addresses:
            found.setdefault(name, set()).update(addresses)
    return found


def joins_ray(process: psutil.Process) -> bool:
    """Whether it is a worker of Ray, or the rollout service of a rank that is one."""
    above = process.parent()
    is_service = program_of(" ".join(process.cmdline())) == "rollout service"
    return any(
        " ".join(one.cmdline()).startswith("ray::")
        for one in (process, above if is_service else None)
        if one is not None
    )


def addresses(*pids: int) -> set[str]:
    """All addresses on which some processes and those below them listen."""
    return set().union(*listening(*pids).values())


def programs(*pids: int) -> dict[str, set[str]]:
    """The addresses on which each program of the table listens below some processes.

    Fails for a process that is in no row.
    """
    found: dict[str, set[str]] = {}
    for command, where in listening(*pids).items():
        name = program_of(command)
        assert name in documented(), f"docs/ports.md has no row for what listens here: {command}"
        found.setdefault(str(name), set()).update(where)
    return found


def program_of(command: str) -> str | None:
    """The row of a command line."""
    return next((name for name, words in PROGRAMS if re.search(words, command)), None)


def documented() -> set[str]:
    """The programs in the table of docs/ports.md."""
    return set(re.findall(r"^\| ([\w ]+?) \|", PORTS.read_text(), re.MULTILINE))
