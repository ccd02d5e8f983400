"""The ways to confine a program on this machine: the command that starts `inside.py`, and its task.

With bubblewrap or unshare the program has a network, a process table, mounts and a root folder of
its own, all of it read-only but /sandbox and /tmp. Where we are root, the program becomes a user
that nothing else has.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from rlcore.deadlines import INTERPRETER_S
from rlcore.errors import ConfigError

STAGE = Path(__file__).with_name("inside.py")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives", "/etc/localtime")
MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/var", "/tmp")
FIRST_UID = 61184  # as systemd's dynamic users; every container's user namespace has it
UIDS = 4000
WORK = "/sandbox"  # the program's folder; on no machine is anything there
# Since Linux 5.14 a user namespace counts its own processes; before, all of the user's count.
COUNTS_APART = (5, 14)
# unshare ends its child when it ends, and does not end when we do
DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0);"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)
PROGRAM_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and the folders without which it does not start."""

    path: str
    folders: tuple[str, ...]


@cache
def interpreter(path: str | None) -> Interpreter:
    """Ask an interpreter, by default our own, where it lives.

    Raises ConfigError if it does not start, or lives where it would show programs too much.
    """
    python = path or sys.executable
    code = "import os, sys; print('\\0'.join([sys.prefix, sys.base_prefix]), end='')"
    try:
        answer = subprocess.run(
            [python, "-I", "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=INTERPRETER_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"reward.sandbox.python: {python} is no interpreter that starts: {error}"
        ) from error
    real = Path(python).resolve()
    found = [*answer.stdout.split("\0"), str(Path(python).parent)]
    # a script that starts an interpreter may be anywhere, as in a home folder's bin
    above = real.parent.parent
    if (above / "pyvenv.cfg").exists() or any(above.glob("lib*/python3.*/os.py")):
        found.append(str(above))
    wanted = [part for one in found for part in (one, os.path.realpath(one))]
    # a link between them, as uv makes, is a folder that must be seen too
    links = [str(Path(os.readlink(python)).parent)] if os.path.islink(python) else []
    folders = minimal([*wanted, *(p for p in links if os.path.isabs(p))])
    for folder in folders:
        for kept, what in ((Path.home(), "home folder"), (Path.cwd(), "current folder")):
            if kept.resolve().is_relative_to(os.path.realpath(folder)):
                raise ConfigError(
                    f"reward.sandbox.python: {python} needs {folder}, and with it programs that a"
                    f" model wrote could read your {what} {kept}; name an interpreter in a folder"
                    " of its own, as `python -m venv` makes"
                )
    return Interpreter(python, folders)


def minimal(folders: Sequence[str]) -> tuple[str, ...]:
    """Return the folders that are in no other of them, nor in the system's."""
    kept: list[str] = []
    for folder in sorted(set(folders)):
        if not any(Path(folder).is_relative_to(other) for other in (*SYSTEM, *kept)):
            kept.append(folder)
    return tuple(kept)


@dataclass(frozen=True)
class Confinement:
    """How programs are started. Its subclasses say with what."""

    python: Interpreter
    folders: tuple[str, ...] = ()  # what programs may read besides the system and the interpreter
    processes: int = 64
    files_mb: int = 64
    proc: bool = True  # a /proc of its own, which some containers forbid

    name = ""
    own_process_table = True  # so that the end of its first process ends all
    supervised = False  # whether `inside.py` stays, and ends what the program leaves
    own_user = True  # whether the program becomes another user where we are root

    @property
    def readable(self) -> tuple[str, ...]:
        """Every folder and file that the program can see, at its own path."""
        present = [path for path in (*SYSTEM, *SYSTEM_FILES) if os.path.exists(path)]
        return (*present, *minimal([*self.python.folders, *self.folders]))

    def command(self, status: int) -> list[str]:
        """Return the command that starts the first process inside; `status` is its descriptor."""
        # its source: no path of ours need exist inside
        source = STAGE.read_text()
        return [*self.prefix(), self.python.path, "-I", "-S", "-c", source, str(status)]

    def prefix(self) -> list[str]:
        """Return the command that makes the namespaces."""
        raise NotImplementedError

    def mounts(self) -> dict[str, Any] | None:
        """Return the plan of the root folder that `inside.py` makes; None: it makes none."""
        return None

    def task(self, slot: int) -> dict[str, Any]:
        """Return what `inside.py` gets to know about the surroundings.

        Args:
            slot: which of the programs that run at the same time.
        """
        changes_user = self.own_user and os.geteuid() == 0
        return {
            "mount": self.mounts(),
            "folder": WORK,
            "supervise": self.supervised,
            "uid": FIRST_UID + (os.getpid() * 31 + slot) % UIDS if changes_user else None,
            "processes": self.process_limit(),
            "environment": {**PROGRAM_ENVIRONMENT, "HOME": WORK, "TMPDIR": WORK},
        }

    def process_limit(self) -> int | None:
        """Return RLIMIT_NPROC."""
        found = re.match(r"(\d+)\.(\d+)", os.uname().release)
        kernel = tuple(map(int, found.groups())) if found else (0, 0)
        if os.geteuid() == 0 or kernel >= COUNTS_APART:
            return self.processes
        return tasks_of_this_user() + self.processes


def tasks_of_this_user() -> int:
    """Count the threads that this user has, which RLIMIT_NPROC counts."""
    found = psutil.process_iter(["uids", "num_threads"])
    own = os.getuid()
    infos = [process.info for process in found]
    return sum(i["num_threads"] or 1 for i in infos if i["uids"] and i["uids"].real == own)


@dataclass(frozen=True)
class Bubblewrap(Confinement):
    """Namespaces and mounts by bubblewrap."""

    options: tuple[str, ...] = ()  # that this bwrap knows
    name = "bubblewrap"

    def prefix(self) -> list[str]:
        size = str(self.files_mb << 20)
        if os.geteuid() == 0:
            # without a user namespace: the program becomes another user, which needs these two
            user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            user = ["--unshare-user"]
            user += ["--disable-userns"] if "--disable-userns" in self.options else []
        binds = [word for path in self.readable for word in ("--ro-bind", path, path)]
        # bwrap makes folders that only their owner may enter
        above = {str(folder) for path in self.readable for folder in Path(path).parents}
        parents = [
            word
            for path in sorted(above - {"/", "/tmp"})
            for word in ("--perms", "0755", "--dir", path)
        ]
        tmpfs = ["--perms", "1777", "--size", size, "--tmpfs"]
        return [
            "bwrap",
            *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            *("--unshare-cgroup-try", "--die-with-parent", "--hostname", "sandbox"),
            *user,
            # first, since the interpreter may be in a folder below it
            *(*tmpfs, "/tmp"),
            *parents,
            *binds,
            *(("--proc", "/proc") if self.proc else ("--dir", "/proc")),
            *("--dev", "/dev", *tmpfs, "/dev/shm", "--remount-ro", "/dev"),
            *(*tmpfs, WORK, "--remount-ro", "/", "--chdir", WORK, "--"),
        ]


@cache
def bwrap_options() -> tuple[str, ...]:
    """Return the options that this bwrap knows."""
    try:
        answer = subprocess.run(
            ["bwrap", "--help"], capture_output=True, text=True, timeout=INTERPRETER_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(re.findall(r"--[a-z-]+", answer.stdout + answer.stderr))


@dataclass(frozen=True)
class Unshare(Confinement):
    """Namespaces by util-linux's unshare, mounts by `inside.py`."""

    name = "unshare"
    supervised = True

    def prefix(self) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        return [
            *(self.python.path, "-I", "-S", "-c", DIE_WITH_PARENT),
            "unshare",
            *user,
            *("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"),
        ]

    def mounts(self) -> dict[str, Any]:
        at = next(
            point
            for point in MOUNT_POINTS
            if os.path.isdir(point)
            and not any(Path(os.path.realpath(p)).is_relative_to(point) for p in self.readable)
        )
        return {
            "at": at,
            "work": WORK,
            "folders": list(self.readable),
            "files_mb": self.files_mb,
            "proc": self.proc,
            "own_users": os.geteuid() != 0,  # else the limit of namespaces is the machine's
        }


@dataclass(frozen=True)
class ResourceLimits(Confinement):
    """UNSAFE: limits alone. The program is this user, with its files, processes and network."""

    name = "rlimits"
    own_process_table = False
    supervised = True
    own_user = False

    def prefix(self) -> list[str]:
        return []

    def process_limit(self) -> int | None:
        """Root has no such limit; another user's processes are all counted."""
        return None if os.geteuid() == 0 else tasks_of_this_user() + self.processes


def candidates(kind: str, settings: Mapping[str, Any]) -> list[Confinement]:
    """Return what may be tried, the best first. Raises ConfigError if nothing is installed."""
    if kind == "rlimits":
        return [ResourceLimits(**settings)]
    found: list[Confinement] = []
    # without --size its folders in memory would have no limit
    if kind != "unshare" and shutil.which("bwrap") and "--size" in bwrap_options():
        found += [
            Bubblewrap(**settings, proc=proc, options=bwrap_options()) for proc in (True, False)
        ]
    if kind != "bubblewrap" and shutil.which("unshare"):
        found += [Unshare(**settings, proc=proc) for proc in (True, False)]
    return found
