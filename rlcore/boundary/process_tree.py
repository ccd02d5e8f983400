"""Finds and kills a process with all its descendants. Uses the standard library alone.

As a program, `python process_tree.py COMMAND...` runs a command on its own input and output. It
leaves no descendant of the command alive when the command ends, when this process gets SIGTERM, or
when this process loses its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

POLL_S = 0.005
KILL_S = 1.5  # less than END_COMMAND_S, after which this program itself is killed
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PAGE = os.sysconf("SC_PAGE_SIZE")


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel end this process when its parent dies, even during an endless call."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none escapes."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`, parents before children."""
    # Most kernels list children, which is cheap even among thousands of processes.
    is_listed = Path("/proc/self/task", str(os.getpid()), "children").exists()
    children = _listed_children if is_listed else _children_of()
    found: list[int] = []
    parents = [pid]
    while parents:
        below = [child for parent in parents for child in children(parent)]
        found += below
        parents = below
    return found


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    # An OSError means that the process has ended.
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _children_of() -> Callable[[int], list[int]]:
    """Index the children of every process, for kernels without lists of children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        # An OSError means that the process has ended.
        with suppress(OSError):
            # "pid (any name) state parent ..."
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    return lambda pid: children.get(pid, [])


def memory(pids: list[int]) -> int:
    """Return the bytes that processes hold together: resident memory and open memory files."""
    total = 0
    # Keyed by device and inode, since several processes may hold one file.
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        # These errors mean that the process has ended.
        with suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
            for file in Path(f"/proc/{pid}/fd").iterdir():
                # An OSError means that the file was closed.
                with suppress(OSError):
                    if os.readlink(file).startswith("/memfd:"):
                        found = file.stat()
                        files[found.st_dev, found.st_ino] = found.st_blocks * 512
    return total + sum(files.values())


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal, unless the process is gone or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_tree(pid: int, *, seconds: float) -> bool:
    """Kill `pid` and its descendants; return False if one was still alive after `seconds`.

    The root must have called `adopt_orphans`. It is stopped first and killed last, so that
    descendants that lose their parent in between are still found below it.
    """
    send(pid, signal.SIGSTOP)
    end = time.monotonic() + seconds
    # Until it is stopped, the root may be forking a process that is not listed yet.
    while _state(pid) not in "TtZX" and time.monotonic() < end:
        time.sleep(POLL_S / 10)
    ended = kill_below(pid, seconds=seconds)
    send(pid, signal.SIGKILL)
    return ended


def kill_below(
    pid: int, *, seconds: float, keep: frozenset[int] = frozenset(), reap: bool = False
) -> bool:
    """Kill the descendants of `pid` except `keep`; return False if one survived `seconds`.

    Args:
        reap: wait for dead processes, which are this process's own children.
    """
    end = time.monotonic() + seconds
    stopped: set[int] = set()
    while True:
        left = [child for child in descendants(pid) if child not in keep]
        if reap:
            left = [child for child in left if not _reaped(child)]
        # A zombie of another parent (Z) is as good as gone (X).
        left = [child for child in left if _state(child) not in "ZX"]
        if not left:
            return True
        if time.monotonic() > end:
            return False
        # Stopped processes cannot fork. Kill them only once a pass finds no new process.
        new = set(left) - stopped
        for child in new:
            send(child, signal.SIGSTOP)
        stopped |= new
        if not new:
            for child in left:
                send(child, signal.SIGKILL)
            time.sleep(POLL_S)


def _reaped(pid: int) -> bool:
    # A grandchild becomes our child once its parent is dead.
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def _state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; X if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def run_whole(command: list[str]) -> int:
    """Run a command; return its exit code once this process has no descendants left.

    As with shells, 127 means that the command cannot be started, and 128 + N that signal N ended
    it.
    """
    adopt_orphans()
    # Python raises SystemExit in the main thread, wherever that waits.
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
