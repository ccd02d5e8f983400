"""The lock of a run's folder, which one process holds.

Where the file system supports locks, it is a record lock, which the system releases however the
process ends. Elsewhere (Lustre without `-o flock`, many FUSE and object mounts) an owner file is
used: its owner rewrites it every few seconds, and it counts as long as it changes. Clocks of
different machines are never compared.
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
    """A lock that this process holds until `release` or its end."""

    descriptor: int
    owner: OwnerFile | None = None  # on file systems without locks

    @classmethod
    def take(cls, folder: Path) -> RunLock:
        """Take the lock of a folder.

        It is a record lock rather than flock: forked children do not inherit it, so a worker that
        outlives its run blocks nobody.

        Raises:
            UserError: another process holds the lock; names it.
        """
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            holder, has_locks = _try_lock(descriptor)
            # An owner file counts even with locks: its writer's mount may have none.
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
    """Wait until no process holds the run in `path`; not for a process that holds the run itself.

    A network file system keeps the lock of a lost machine until its lease has expired.

    Args:
        key: the configuration key that sets the limit.
        tick: called during the wait.

    Raises:
        DeadlineExceeded: the run is still held after `limit_s`; names the holder.
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
    """Return the holder of a run's record lock; None if it is free or locks are unsupported."""
    # Closing the file releases the lock too.
    with open(path / LOCK, "a+b") as file:
        return _try_lock(file.fileno())[0]


def _try_lock(descriptor: int) -> tuple[str | None, bool]:
    """Take the record lock. Returns another process that holds it, and whether locks exist."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        return holder or "another process", True
    except OSError:
        # ENOTSUP, ENOLCK, ENOSYS, ...
        return None, False
    return None, True


# --- owner files ----------------------------------------------------------------------------------


class OwnerFile:
    """The file that names a folder's owner, rewritten by a thread until `remove`.

    The constructor warns that this is not a real lock.

    Raises:
        UserError: another process has just created the file.
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
        """Give up the folder."""
        self._stopped.set()
        if self._is_ours():
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stopped.wait(OWNER_BEAT_S):
            try:
                if not self._is_ours():
                    logger.error(
                        "%s no longer belongs to this process: another one has taken the run over;"
                        " stop one of the two",
                        self.path,
                    )
                    return
                self.record["beats"] += 1
                aside = self.path.with_name(f"{OWNER}.{self.record['id']}")
                aside.write_text(json.dumps(self.record))
                os.replace(aside, self.path)
            except OSError as error:
                # The file server may be away for a while; the next beat tries again.
                logger.warning("%s could not be rewritten: %s", self.path, error)

    def _is_ours(self) -> bool:
        return (_read_owner(self.path) or {}).get("id") == self.record["id"]


class _OwnerWatch:
    """Reports whether the owner file of a folder is kept alive, by reading it repeatedly."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / OWNER
        # The file's content at the last look.
        self.newest: dict[str, Any] | None = None
        self._since = 0.0
        # Whether the file has changed during this watch.
        self.beats = False

    def holder(self) -> str | None:
        """Return the owner; None if there is none, or it has been silent for too long."""
        before = self.newest
        found = self.newest = _read_owner(self._path)
        if found is None:
            return None
        among_ours = bool(_boot()) and found.get("boot") == _boot()
        if among_ours and not Path(f"/proc/{found.get('pid')}").exists():
            # The owner ran in this machine or container.
            return None
        if found != before:
            self.beats = before is not None
            self._since = time.monotonic()
        elif time.monotonic() - self._since > OWNER_LOST_S:
            return None
        return str(found.get("process", "another process"))


def _wait_for_beat(folder: Path) -> str | None:
    """Return the owner named by the folder's owner file; a file without beats is removed."""
    watch = _OwnerWatch(folder)
    if (holder := watch.holder()) is not None:
        text = "%s names %s as its owner: waiting up to %g s for a sign of life"
        logger.warning(text, folder / OWNER, holder, OWNER_LOST_S)
    while holder is not None:
        if watch.beats:
            return holder
        time.sleep(POLL_S)
        holder = watch.holder()
    if watch.newest is not None and watch.newest == _read_owner(folder / OWNER):
        (folder / OWNER).unlink(missing_ok=True)
    return None


def _in_use(folder: Path, holder: str) -> UserError:
    return UserError(f"{folder} is in use by {holder}: stop that first, or choose another run.name")


def _read_owner(path: Path) -> dict[str, Any] | None:
    """Return the content of an owner file: None without a file, {} for one being written."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _boot() -> str:
    """Return the id of the machine's boot and of this process's pid namespace."""
    found = ""
    with suppress(OSError):
        found = f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return found


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
