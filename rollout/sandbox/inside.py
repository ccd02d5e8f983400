"""The first process inside a sandbox. It restricts its surroundings, then becomes the program.

Its source is passed to `python -I -S -c`, so it imports only the standard library. It reads its
task as JSON from standard input. Into the descriptor given as its argument it writes "ready" when
only the program itself can still fail, or otherwise the error.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import resource
import signal
import sys
import time
from typing import Any

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MNT_DETACH = 2
MOUNT_SETATTR = 442  # the same on every architecture
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
KEYCTL_JOIN_SESSION_KEYRING = 1
# keyctl(2); every architecture newer than these has 219
KEYCTL = {"x86_64": 250, "i686": 288, "ppc64le": 271, "s390x": 280}
DEVICES = ("null", "zero", "full", "random", "urandom")
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Do the task. The exit code is the program's."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    status = int(sys.argv[1])
    os.set_inheritable(status, False)
    try:
        task = json.load(sys.stdin)
        os.closerange(3, status)
        os.closerange(status + 1, max(4096, status + 1))
        if task["mount"] is not None:
            make_root(task["mount"])
        enter_folder(task)
        if task["supervise"]:
            supervise(status, task["alarm"])
        limit(task["limits"])
        drop_privileges(task["uid"])
        os.write(status, b"ready")
        os.execve(task["argv"][0], task["argv"], task["environment"])
    except BaseException as error:  # noqa: BLE001 - reported to the caller, whatever it is
        os.write(status, f"{type(error).__name__}: {error}"[:2000].encode("utf-8", "replace"))
        os._exit(125)


def checked(result: int, what: str) -> None:
    """Raise the C library's error, if any."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    """Call mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else options.encode()
    checked(libc.mount(*texts, ctypes.c_ulong(flags), data), f"mount {target}")


def make_root(plan: dict[str, Any]) -> None:
    """Make a read-only root folder with everything that the program may see."""
    root = plan["at"]
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    # /tmp first, since the interpreter may be in a folder below it
    memory_folder(f"{root}/tmp", plan["files_mb"])
    for source in plan["folders"]:
        show(source, root + source)
    for name in DEVICES:
        show(f"/dev/{name}", f"{root}/dev/{name}", devices=True)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    memory_folder(f"{root}/dev/shm", plan["files_mb"])
    memory_folder(root + plan["work"], plan["files_mb"])
    os.makedirs(f"{root}/proc")
    if plan["proc"]:
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
        if plan["own_users"]:
            # in a new user namespace a program would be root again
            with open(f"{root}/proc/sys/user/max_user_namespaces", "w") as file:
                file.write("0")
    os.chdir(root)
    checked(libc.pivot_root(b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
    mount("none", "/", None, flags, None)


def memory_folder(target: str, megabytes: int) -> None:
    """Make a world-writable folder in memory."""
    os.makedirs(target)
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"size={megabytes}m,mode=1777")


def show(source: str, target: str, devices: bool = False) -> None:
    """Bind a file or folder, read-only with all mounts below it."""
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(os.path.realpath(source), target, None, MS_BIND | MS_REC, None)
    attributes = (ctypes.c_uint64 * 4)(MS_NOSUID if devices else MS_RDONLY | MS_NOSUID | MS_NODEV)
    result = libc.syscall(
        MOUNT_SETATTR,
        AT_FDCWD,
        os.fsencode(target),
        AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.c_size_t(32),
    )
    checked(result, f"make {target} read-only")


def enter_folder(task: dict[str, Any]) -> None:
    """Write the files, enter the folder, and make the program's input standard input."""
    os.umask(0o077 if task["uid"] is None else 0)
    os.chdir(task["folder"])
    for name, content in task["files"].items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))
    given = os.open(".stdin", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    os.unlink(".stdin")
    content = memoryview(base64.b64decode(task["stdin"]))
    while content:
        content = content[os.write(given, content) :]
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.close(given)
    os.umask(0o022)


def limit(limits: dict[str, int]) -> None:
    """Set resource limits, as far as this process may."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def drop_privileges(uid: int | None) -> None:
    """Become a user without any privileges or keys, irrevocably."""
    # no namespace isolates keyrings, so leave the caller's
    number = KEYCTL.get(os.uname().machine, 219)
    left = libc.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None)
    # tolerate kernels without keys, and containers whose filter forbids keyctl altogether
    if left < 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        checked(left, "leave the session keyring")
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    number = 0
    while libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def supervise(status: int, seconds: int) -> None:
    """Continue as a child; this process waits, ends leftovers, and exits with the child's code.

    It exits after `seconds` in any case, since its caller may be killed.
    """
    libc.prctl(PR_SET_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        # only for the same user; otherwise the namespace ends the child
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    os.close(status)
    # its memory holds the task, which the program must not read
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    def give_up(*_: object) -> None:
        end_all()
        os._exit(124)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    code = 125
    while True:
        pid, ended = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(ended)
            break
    end_all()
    os._exit(code if code >= 0 else 128 - code)


def end_all() -> None:
    """Kill and reap all remaining processes, including orphans, which are now our children."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
        except OSError:
            # without /proc: the end of this process ends its namespace
            return
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.002)


if __name__ == "__main__":
    main()
