"""Finds and ends a process with everything that descends from it. Standard library alone.

As a program, `python process_tree.py COMMAND...`, it runs a command on its own input and output and
leaves nothing of it behind: neither when the command ends, nor when this process is asked to end or
loses its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

POLL_S = 0.005
KILL_S = 1.5  # less than the 2 s from SIGTERM to SIGKILL that whoever runs a command may give
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PAGE = os.sysconf("SC_PAGE_SIZE")


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent is killed, even in an endless call."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, so that none gets away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, parents before children."""
    children = _children_of() if not _knows_children() else _listed_children
    found: list[int] = []
    parents = [pid]
    while parents:
        below = [child for parent in parents for child in children(parent)]
        found += below
        parents = below
    return found


def _knows_children() -> bool:
    return Path("/proc/self/task", str(os.getpid()), "children").exists()


def _listed_children(pid: int) -> list[int]:
    """Ask the kernel, which costs nothing on a machine with thousands of processes."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _children_of() -> Callable[[int], list[int]]:
    """Look at every process, where the kernel has no lists of children."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    return lambda pid: children.get(pid, [])


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            # "pid (any name) state parent ..."
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            yield int(entry.name), int(fields[1])


def memory(pids: list[int]) -> int:
    """Return the bytes of processes together: what is resident, and open files of memory alone."""
    total = 0
    files: dict[tuple[int, int], int] = {}  # several processes may hold one
    for pid in pids:
        with suppress(OSError, IndexError, ValueError):  # it has ended
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # it was closed
                    if os.readlink(file).startswith("/memfd:"):
                        found = file.stat()
                        files[found.st_dev, found.st_ino] = found.st_blocks * 512
    return total + sum(files.values())


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone is none."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_tree(pid: int, *, seconds: float) -> bool:
    """Kill `pid` and everything below it; False if something was still there after `seconds`.

    The root must have called `adopt_orphans`. It is stopped first and killed last, so that what
    loses its parent meanwhile is still found below it.
    """
    send(pid, signal.SIGSTOP)
    end = time.monotonic() + seconds
    # it may be making a process right now, which would not be found yet
    while _state(pid) not in "TtZX" and time.monotonic() < end:
        time.sleep(POLL_S / 10)
    ended = kill_below(pid, seconds=seconds)
    send(pid, signal.SIGKILL)
    return ended


def kill_below(
    pid: int, *, seconds: float, keep: frozenset[int] = frozenset(), reap: bool = False
) -> bool:
    """Kill everything below `pid` but `keep`; False if something was left after `seconds`.

    Args:
        reap: wait for the dead; they are this process's own children.
    """
    end = time.monotonic() + seconds
    stopped: set[int] = set()
    while True:
        left = [child for child in descendants(pid) if child not in keep]
        if reap:
            left = [child for child in left if not _reaped(child)]
        left = [child for child in left if not _is_dead(child)]
        if not left:
            return True
        if time.monotonic() > end:
            return False
        # what is stopped cannot fork: kill only once a look finds nothing new
        new = set(left) - stopped
        for child in new:
            send(child, signal.SIGSTOP)
        stopped |= new
        if not new:
            for child in left:
                send(child, signal.SIGKILL)
            time.sleep(POLL_S)


def _reaped(pid: int) -> bool:
    with suppress(ChildProcessError):  # a grandchild: it will be ours when its parent is dead
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def _is_dead(pid: int) -> bool:
    """Tell whether it is gone, or a zombie, which only its parent can take away."""
    return _state(pid) in "ZX"


def _state(pid: int) -> str:
    """Return the kernel's letter for what it does; X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def run_whole(command: list[str]) -> int:
    """Run a command; return its exit code once nothing below this process is left.

    As with shells, 127 says that it cannot be started, and 128 and a number that this signal has
    ended it.
    """
    adopt_orphans()
    # raised in the main thread, wherever it waits
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    die_with_parent(signal.SIGTERM)
    try:
        code = subprocess.run(command, check=False).returncode
        return code if code >= 0 else 128 - code
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr)
        return 127
    finally:
        kill_below(os.getpid(), seconds=KILL_S, reap=True)


if __name__ == "__main__":
    sys.exit(run_whole(sys.argv[1:]))
