"""The lock of a run's folder, which one process holds.

Where the file system has locks, it is a record lock, which the system releases however the process
ends. Elsewhere (Lustre without `-o flock`, many FUSE and object mounts) an owner file takes its
place, which its owner rewrites every few seconds: it counts as long as it changes. Nobody's clock
is compared with another's.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.deadlines import OWNER_BEAT_S, OWNER_LOST_S
from rlcore.errors import DeadlineExceeded, UserError

logger = logging.getLogger(__name__)

LOCK = ".lock"
OWNER = ".owner"
POLL_S = 0.5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class RunLock:
    """A lock that this process holds until `release`, or its end."""

    descriptor: int
    owner: OwnerFile | None = None  # where the file system has no locks

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """Take the lock of a folder.

        A record lock, not flock: forked children do not inherit it, so a worker that outlives its
        run blocks nobody.

        Raises:
            UserError: another process holds it; names that.
        """
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            holder, has_locks = _try_lock(descriptor)
            # An owner file counts in any case: its writer's mount may have no locks.
            if holder is None:
                holder = _wait_for_beat(folder)
            if holder is not None:
                raise _in_use(folder, holder)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{_this_process()}\n".encode(), 0)
            return cls(descriptor, None if has_locks else OwnerFile(folder))
        except BaseException:
            os.close(descriptor)
            raise

    def release(self) -> None:
        """Release the lock."""
        if self.owner is not None:
            self.owner.remove()
        os.close(self.descriptor)


def wait_until_free(
    path: Path, *, limit_s: float, key: str, tick: Callable[[], None] = lambda: None
) -> None:
    """Wait until no process holds the run in `path`; not for a process that holds it itself.

    A network file system keeps the lock of a lost machine until its lease has run out.

    Args:
        key: the configuration's key that sets the limit.
        tick: called while we wait.

    Raises:
        DeadlineExceeded: it is still held after `limit_s`; names the holder.
    """
    deadline = time.monotonic() + limit_s
    watch = _OwnerWatch(path)
    while (holder := lock_holder(path) or watch.holder()) is not None:
        tick()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{path} was to be taken over and is still in use by {holder} after {limit_s:g} s"
                f" ({key}): stop that, or where its machine is lost wait until the file system"
                " gives its lock back; then continue with --resume"
            )
        time.sleep(POLL_S)


# --- record locks ---------------------------------------------------------------------------------


def lock_holder(path: Path) -> str | None:
    """Return the holder of a run's record lock; None if it is free, or the file system has none."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return _try_lock(descriptor)[0]
    finally:
        os.close(descriptor)  # with the lock


def _try_lock(descriptor: int) -> tuple[str | None, bool]:
    """Take the record lock. Returns its holder if that is another, and whether there are locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        return holder or "another process", True
    except OSError:  # ENOTSUP, ENOLCK, ENOSYS, ...
        return None, False
    return None, True


# --- owner files ----------------------------------------------------------------------------------


class OwnerFile:
    """The file that says who owns a folder, rewritten by a thread until `remove`.

    Making it warns that this is no lock.

    Raises:
        UserError: another process has made one just now.
    """

    def __init__(self, folder: Path) -> None:
        logger.warning(
            "the file system of %s has no locks: %s, rewritten every %g s, keeps other processes"
            " out. It cannot keep out one that starts while this machine hangs: start this run in"
            " one place alone, or put run.dir on a file system with locks (Lustre: mount -o flock)",
            folder,
            OWNER,
            OWNER_BEAT_S,
        )
        self.path = folder / OWNER
        mine = {"id": secrets.token_hex(8), "process": _this_process()}
        self.record: dict[str, Any] = {**mine, "boot": _boot(), "pid": os.getpid(), "beats": 0}
        try:
            with open(self.path, "x") as file:
                json.dump(self.record, file)
        except FileExistsError:
            holder = (_read_owner(self.path) or {}).get("process", "another process")
            raise _in_use(folder, holder) from None
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, name="owner file", daemon=True).start()

    def remove(self) -> None:
        """Give the folder up."""
        self._stopped.set()
        if self._is_ours():
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stopped.wait(OWNER_BEAT_S):
            try:
                if not self._is_ours():
                    logger.error(
                        "%s is no longer this process's: another one has taken the run over; stop"
                        " one of the two",
                        self.path,
                    )
                    return
                self.record["beats"] += 1
                aside = self.path.with_name(f"{OWNER}.{self.record['id']}")
                aside.write_text(json.dumps(self.record))
                os.replace(aside, self.path)
            except OSError as error:  # a file server away for a while; the next beat tries again
                logger.warning("%s could not be rewritten: %s", self.path, error)

    def _is_ours(self) -> bool:
        return (_read_owner(self.path) or {}).get("id") == self.record["id"]


class _OwnerWatch:
    """Tells whether the owner file of a folder beats, by looking at it again and again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / OWNER
        self.newest: dict[str, Any] | None = None  # the file's content at the last look
        self._since = 0.0
        self.beats = False  # whether it has changed before our eyes

    def holder(self) -> str | None:
        """Return the owner; None if there is none, or it has not been heard of for long."""
        before = self.newest
        found = self.newest = _read_owner(self._path)
        if found is None or _is_gone(found):
            return None
        if found != before:
            self.beats = before is not None
            self._since = time.monotonic()
        elif time.monotonic() - self._since > OWNER_LOST_S:
            return None
        return str(found.get("process", "another process"))


def _wait_for_beat(folder: Path) -> str | None:
    """Return who owns the folder by its owner file; one that has not beaten for long goes."""
    watch = _OwnerWatch(folder)
    has_warned = False
    while (holder := watch.holder()) is not None:
        if watch.beats:
            return holder
        if not has_warned:
            has_warned = True
            text = "%s names %s as its owner: waiting up to %g s for a sign of life"
            logger.warning(text, folder / OWNER, holder, OWNER_LOST_S)
        time.sleep(POLL_S)
    if watch.newest is not None and watch.newest == _read_owner(folder / OWNER):
        (folder / OWNER).unlink(missing_ok=True)
    return None


def _in_use(folder: Path, holder: str) -> UserError:
    return UserError(f"{folder} is in use by {holder}: stop that first, or choose another run.name")


def _read_owner(path: Path) -> dict[str, Any] | None:
    """Return the content of an owner file, None if there is none; {} for one being written."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether the owner ran among the processes of this machine, or container, and is no more."""
    among_ours = bool(_boot()) and owner.get("boot") == _boot()
    return among_ours and not Path(f"/proc/{owner.get('pid')}").exists()


def _boot() -> str:
    """Return the id of the machine's boot and of this process's table of pids."""
    found = ""
    with suppress(OSError):
        found = f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return found


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
