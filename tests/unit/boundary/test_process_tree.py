"""`python process_tree.py COMMAND...` leaves nothing of a command behind; what memory counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rlcore.boundary import process_tree

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper")

GUARD = [sys.executable, "-I", "-S", str(Path(process_tree.__file__))]
# starts a process in a session of its own, tells its number, and does as its argument says
COMMAND = """
import subprocess, sys
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
sys.exit(7)
"""
PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"


@contextmanager
def started(*command: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def ends(pid: int) -> bool:
    """Whether a process ends within 20 s."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return False


def test_what_a_command_left_ends_with_it() -> None:
    with started(*GUARD, sys.executable, "-c", COMMAND, "end") as (process, left):
        assert process.wait(20) == 7
        assert ends(left)


def test_a_command_ends_when_its_input_does() -> None:
    with started(*GUARD, sys.executable, "-c", COMMAND, "wait") as (process, left):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 7
        assert ends(left)
        process.stdin = None


def test_it_can_be_asked_to_end() -> None:
    with started(*GUARD, sys.executable, "-c", COMMAND, "wait") as (process, left):
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
        assert ends(left)


def test_it_ends_when_its_parent_is_killed() -> None:
    guarded = [*GUARD, sys.executable, "-c", COMMAND, "wait"]
    with started(sys.executable, "-c", PARENT, *guarded) as (process, left):
        process.kill()
        assert ends(left)


def test_files_of_memory_count_once_among_those_who_hold_them() -> None:
    before = process_tree.memory([os.getpid()])
    held = [os.memfd_create("held") for _ in range(2)]
    held.append(os.dup(held[0]))
    try:
        for file in held[:2]:
            os.write(file, bytes(32 << 20))
        grown = process_tree.memory([os.getpid()]) - before
    finally:
        for file in held:
            os.close(file)
    assert 60 << 20 < grown < 90 << 20
