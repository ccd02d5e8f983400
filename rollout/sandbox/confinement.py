"""Ways to confine a program on this machine: the command that starts `inside.py`, and its task.

With bubblewrap or unshare the program has its own network, process table, mounts and root folder,
all of it read-only but /sandbox and /tmp. If we are root, the program becomes a user that owns
nothing else.
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
FIRST_UID = 61184  # range of systemd's dynamic users; every container's user namespace has it
UIDS = 4000
WORK = "/sandbox"  # the program's folder; the path exists on no machine
# Since Linux 5.14 a user namespace counts only its own processes; before, all of the user's.
COUNTS_APART = (5, 14)
# unshare ends its child when it ends, but does not end when we do
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
    """A Python interpreter, and the folders that it needs to start."""

    path: str
    folders: tuple[str, ...]


@cache
def interpreter(path: str | None) -> Interpreter:
    """Ask an interpreter, by default our own, for its folders.

    Raises ConfigError if it does not start, or if its folders would expose too much to programs.
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
    # a script that starts an interpreter may be anywhere, for example in a home folder's bin
    above = real.parent.parent
    if (above / "pyvenv.cfg").exists() or any(above.glob("lib*/python3.*/os.py")):
        found.append(str(above))
    wanted = [part for one in found for part in (one, os.path.realpath(one))]
    # the folder of an intermediate link, as uv makes, must be visible too
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
    """The folders that lie in no other of them, nor in the system's."""
    kept: list[str] = []
    for folder in sorted(set(folders)):
        if not any(Path(folder).is_relative_to(other) for other in (*SYSTEM, *kept)):
            kept.append(folder)
    return tuple(kept)


@dataclass(frozen=True)
class Confinement:
    """The way in which programs are started; subclasses choose the tool."""

    python: Interpreter
    folders: tuple[str, ...] = ()  # readable folders beyond the system and the interpreter
    processes: int = 64
    files_mb: int = 64
    proc: bool = True  # a /proc of its own, which some containers forbid

    name = ""
    own_process_table = True  # the end of its first process ends all
    supervised = False  # whether `inside.py` stays, and ends leftover processes
    own_user = True  # whether the program becomes another user if we are root

    @property
    def readable(self) -> tuple[str, ...]:
        """Every folder and file that the program can see, at its own path."""
        present = [path for path in (*SYSTEM, *SYSTEM_FILES) if os.path.exists(path)]
        return (*present, *minimal([*self.python.folders, *self.folders]))

    def command(self, status: int) -> list[str]:
        """The command that starts the first process inside; `status` is its descriptor."""
        # passed as source, so that no path of ours has to exist inside
        source = STAGE.read_text()
        return [*self.prefix(), self.python.path, "-I", "-S", "-c", source, str(status)]

    def prefix(self) -> list[str]:
        """The command that creates the namespaces; empty without any."""
        return []

    def mounts(self) -> dict[str, Any] | None:
        """The plan of the root folder for `inside.py`; None: `inside.py` creates none."""
        return None

    def task(self, slot: int) -> dict[str, Any]:
        """The facts about the surroundings that `inside.py` needs.

        Args:
            slot: number of the program among those that run at the same time.
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
        """The value of RLIMIT_NPROC."""
        found = re.match(r"(\d+)\.(\d+)", os.uname().release)
        kernel = tuple(map(int, found.groups())) if found else (0, 0)
        if os.geteuid() == 0 or kernel >= COUNTS_APART:
            return self.processes
        return tasks_of_this_user() + self.processes


def tasks_of_this_user() -> int:
    """Count the threads of this user, which RLIMIT_NPROC limits."""
    found = psutil.process_iter(["uids", "num_threads"])
    own = os.getuid()
    infos = [process.info for process in found]
    return sum(i["num_threads"] or 1 for i in infos if i["uids"] and i["uids"].real == own)


@dataclass(frozen=True)
class Bubblewrap(Confinement):
    """Namespaces and mounts by bubblewrap."""

    options: tuple[str, ...] = ()  # options that this bwrap supports
    name = "bubblewrap"

    def prefix(self) -> list[str]:
        size = str(self.files_mb << 20)
        if os.geteuid() == 0:
            # no user namespace: becoming another user needs these two capabilities
            user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            user = ["--unshare-user"]
            user += ["--disable-userns"] if "--disable-userns" in self.options else []
        binds = [word for path in self.readable for word in ("--ro-bind", path, path)]
        # bwrap creates parent folders that only their owner may enter
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
            # first, since the interpreter may be in a folder below /tmp
            *(*tmpfs, "/tmp"),
            *parents,
            *binds,
            *(("--proc", "/proc") if self.proc else ("--dir", "/proc")),
            *("--dev", "/dev", *tmpfs, "/dev/shm", "--remount-ro", "/dev"),
            *(*tmpfs, WORK, "--remount-ro", "/", "--chdir", WORK, "--"),
        ]


@cache
def bwrap_options() -> tuple[str, ...]:
    """The options that this bwrap supports."""
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
            # root gets no user namespace here, so the machine's limit of namespaces applies
            "own_users": os.geteuid() != 0,
        }


@dataclass(frozen=True)
class ResourceLimits(Confinement):
    """UNSAFE: limits alone. The program is this user, with its files, processes and network."""

    name = "rlimits"
    own_process_table = False
    supervised = True
    own_user = False

    def process_limit(self) -> int | None:
        return None if os.geteuid() == 0 else tasks_of_this_user() + self.processes


def candidates(kind: str, settings: Mapping[str, Any]) -> list[Confinement]:
    """The confinements to try, best first. Raises ConfigError if nothing is installed."""
    if kind == "rlimits":
        return [ResourceLimits(**settings)]
    found: list[Confinement] = []
    # bwrap without --size cannot limit its folders in memory
    if kind != "unshare" and shutil.which("bwrap") and "--size" in bwrap_options():
        found += [
            Bubblewrap(**settings, proc=proc, options=bwrap_options()) for proc in (True, False)
        ]
    if kind != "bubblewrap" and shutil.which("unshare"):
        found += [Unshare(**settings, proc=proc) for proc in (True, False)]
    return found
