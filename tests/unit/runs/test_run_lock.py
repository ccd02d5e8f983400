"""One process holds a run's folder, on file systems with locks and on those without."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.errors import DeadlineExceeded, UserError
from rlcore.runs import lock
from rlcore.runs.directory import RunDirectory
from rlcore.runs.lock import OWNER, RunLock, wait_until_free

BEAT_S = 0.05
LOST_S = 0.6
LIMIT_S = 60.0


def used(root: Path) -> None:
    run = RunDirectory.create(root, "a")
    run.write_config({"run": {"name": "a"}})
    run.close()


HOLDER = """
import sys
from rlcore.runs.directory import RunDirectory
run = RunDirectory.create(sys.argv[1], "a", resume=True)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_elsewhere(root: Path) -> Iterator[int]:
    """Run `a` is held by a process, whose id it is; that is killed in the end."""
    command = [sys.executable, "-c", HOLDER, str(root)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.wait(timeout=10)
        holder.stdin.close()
        holder.stdout.close()


def test_a_run_that_is_written_by_a_living_process_is_refused(tmp_path: Path) -> None:
    """A process that takes over from a lost one waits for a while."""
    used(tmp_path)
    ticks: list[None] = []
    with held_elsewhere(tmp_path) as pid:
        for flags in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(UserError, match=f"in use by pid {pid}"):
                RunDirectory.create(tmp_path, "a", **flags)
        with pytest.raises(
            DeadlineExceeded, match=rf"still in use by pid {pid} on .* after 0\.1 s \(a\.key\)"
        ):
            wait_until_free(
                tmp_path / "a", limit_s=0.1, key="a.key", tick=lambda: ticks.append(None)
            )
    assert ticks
    wait_until_free(tmp_path / "a", limit_s=0.1, key="a.key")
    assert RunDirectory.create(tmp_path, "a", resume=True).resumed, "a killed process holds nothing"


# --- without locks --------------------------------------------------------------------------------


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(lock, "OWNER_BEAT_S", BEAT_S)
    monkeypatch.setattr(lock, "OWNER_LOST_S", LOST_S)
    monkeypatch.setattr(lock, "POLL_S", BEAT_S / 5)


class Clock:
    """Stands in for `time` where the lock looks at it: time passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.beat: Callable[[], None] = lambda: None  # once in BEAT_S, of another machine

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        before = self.now // BEAT_S
        self.now += seconds
        if self.now // BEAT_S > before:
            self.beat()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lock, "time", clock)
    return clock


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(BEAT_S / 5)


def elsewhere(folder: Path, beats: int = 0) -> None:
    """Write the owner file of a process of another machine."""
    record = {"id": "theirs", "process": "pid 7 on node9", "boot": "b", "pid": 7, "beats": beats}
    aside = folder / "aside"
    aside.write_text(json.dumps(record))
    aside.rename(folder / OWNER)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_an_owner_file_beats_and_there_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "OWNER_LOST_S", LIMIT_S)  # of its thread, which may be held up
    held = RunLock.take(tmp_path)
    assert "has no locks" in caplog.text
    owner = tmp_path / OWNER
    first = owner.read_bytes()
    wait_until(lambda: owner.read_bytes() != first)
    with pytest.raises(UserError, match=rf"in use by pid {os.getpid()} on"):
        RunLock.take(tmp_path)
    held.release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    RunLock.take(tmp_path).release()


@pytest.mark.usefixtures("no_locks")
def test_an_owner_of_another_machine_that_beats_is_not_replaced(
    tmp_path: Path, clock: Clock
) -> None:
    elsewhere(tmp_path)
    beats = itertools.count(1)
    clock.beat = lambda: elsewhere(tmp_path, next(beats))
    with pytest.raises(UserError, match="in use by pid 7 on node9"):
        RunLock.take(tmp_path)
    with pytest.raises(DeadlineExceeded, match="still in use by pid 7 on node9"):
        wait_until_free(tmp_path, limit_s=2 * LOST_S, key="a.key")
    assert "theirs" in (tmp_path / OWNER).read_text()


@pytest.mark.usefixtures("no_locks")
def test_an_owner_that_has_not_beaten_for_long_is_replaced(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    began = time.monotonic()
    wait_until_free(tmp_path, limit_s=LIMIT_S, key="a.key")
    held = RunLock.take(tmp_path)
    assert time.monotonic() - began > 2 * LOST_S, "a sign of life was waited for, twice"
    assert held.owner is not None
    assert json.loads((tmp_path / OWNER).read_text())["id"] == held.owner.record["id"]
    held.release()


@pytest.mark.usefixtures("no_locks")
def test_a_process_that_ended_here_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "OWNER_LOST_S", 10 * LIMIT_S)
    ended = subprocess.Popen(["true"])
    ended.wait(timeout=LIMIT_S)
    record = {"id": "x", "process": "it", "boot": lock._boot(), "pid": ended.pid}
    (tmp_path / OWNER).write_text(json.dumps(record))
    RunLock.take(tmp_path).release()


@pytest.mark.usefixtures("no_locks")
def test_an_owner_that_is_replaced_says_so_and_leaves_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = RunLock.take(tmp_path)

    def says_so() -> bool:
        elsewhere(tmp_path)  # again, where a beat that had begun has put its file over the other
        return "another one has taken the run over" in caplog.text

    wait_until(says_so)
    held.release()
    assert "theirs" in (tmp_path / OWNER).read_text()


def test_an_owner_file_counts_where_this_mount_has_locks(tmp_path: Path, clock: Clock) -> None:
    """Its writer's mount may have none."""
    elsewhere(tmp_path)
    clock.beat = lambda: elsewhere(tmp_path, 1)
    with pytest.raises(UserError, match="in use by pid 7 on node9"):
        RunLock.take(tmp_path)


def test_with_locks_there_is_no_owner_file(tmp_path: Path) -> None:
    held = RunLock.take(tmp_path)
    assert held.owner is None
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    held.release()
