"""What a tree of processes listens on, from /proc."""

from __future__ import annotations

import psutil


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
            addresses = {
                connection.laddr.ip
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            name = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if addresses:
            found.setdefault(name, set()).update(addresses)
    return found


def addresses(*pids: int) -> set[str]:
    """All addresses on which some processes and those below them listen."""
    return set().union(*listening(*pids).values())
