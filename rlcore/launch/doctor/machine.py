"""What the machine offers, where it is cheap to look at: memory, files, disk, locks, a clock."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import rlcore
from rlcore.launch.doctor.finding import GIB, Finding, gib
from rlcore.launch.doctor.needs import Needs
from rlcore.launch.environment import THREADS, cores

SHM = Path("/dev/shm")
SHM_LEAST = 16 << 20  # for a trainer of one process
SHM_AMPLE = 1 << 30  # ... and what NCCL, SGLang and Ray put there for several
DISK_LEAST = 256 << 20  # for logs, recordings and a toy's checkpoint
PER_PARAMETER = 14  # bytes in a checkpoint: bf16, and fp32 of weights and both moments
SKEW_S = 2.0  # between our clock and the file system's


def shared_memory(needs: Needs) -> Iterator[Finding]:
    """Room in /dev/shm."""
    if not SHM.is_dir():
        advice = "mount a tmpfs there"
        yield Finding("FAIL", "/dev/shm", "there is none", "shared memory of processes", advice)
        return
    size = shutil.disk_usage(SHM)
    found = f"{gib(size.free)} of {gib(size.total)} free"
    advice = "remove what dead processes left there, or give the container --shm-size or --ipc=host"
    if size.free < SHM_LEAST:
        yield Finding("FAIL", "/dev/shm", found, f"{SHM_LEAST >> 20} MiB free", advice)
    elif size.free < SHM_AMPLE and (needs.several or not needs.configured):
        needed = f"{gib(SHM_AMPLE)} for several processes"
        yield Finding("note", "/dev/shm", found, needed, advice)
    else:
        yield Finding("ok", "/dev/shm", found)


def threads(needs: Needs) -> Iterator[Finding]:
    """The threads that a process computes with: too many of them fight where others compute."""
    given = os.environ.get(THREADS)
    chosen = f"{THREADS}={given}" if given else "measured when a run starts on a CPU"
    yield Finding("ok", "threads", f"{cores()} cores, {chosen}; run.threads sets another number")


def open_files(needs: Needs) -> Iterator[Finding]:
    """The limit of open files: each request in flight has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needs.files:
        limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        yield Finding("ok", "open files", f"at most {limit}", str(needs.files))
        return
    may = hard == resource.RLIM_INFINITY or hard >= needs.files
    advice = (
        f"run `ulimit -n {needs.files}` first, or lower rollout.engine.max_in_flight"
        if may
        else f"have the hard limit of {hard} raised (limits.conf, docker --ulimit nofile)"
    )
    yield Finding("FAIL", "open files", f"at most {soft}", str(needs.files), advice)


def bytecode() -> Iterator[Finding]:
    """Whether processes find the modules that they import compiled."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    written = Path(importlib.util.cache_from_source(torch.origin)).is_file()
    if sys.dont_write_bytecode and not written:
        yield Finding(
            "note",
            "bytecode",
            "there is none of torch, and PYTHONDONTWRITEBYTECODE is set",
            "bytecode, else every process compiles what it imports, which takes seconds",
            "unset PYTHONDONTWRITEBYTECODE for a first start",
        )
    else:
        yield Finding("ok", "bytecode", "is there" if written else "written at the first import")


def run_folder(needs: Needs) -> Iterator[Finding]:
    """The disk of the run's folder: can be written, has room, locks, and tells our time."""
    folder = Path(os.path.abspath(needs.run_folder))
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rlcore-doctor-") as probe:
            probe.write(b"x")
            probe.flush()
            skew = os.fstat(probe.fileno()).st_mtime - time.time()
            locks = _locks(probe.fileno())
    except OSError as error:
        advice = "set run.dir to a folder that can be written"
        found = f"{folder}: {error.strerror or error}"
        yield Finding("FAIL", "run folder", found, "a folder to write into", advice)
        return
    yield from _room(folder, needs)
    if locks:
        yield Finding("ok", "locks", f"the file system of {folder} locks")
    else:
        advice = "start no two runs of one name; a disk or an NFS with locks sees to that itself"
        found = f"the file system of {folder} does not lock"
        yield Finding("note", "locks", found, "locks, which keep a run's name to one run", advice)
    yield from _clock(skew)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _room(folder: Path, needs: Needs) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    found = f"{gib(free)} free in {folder}"
    advice = "free some, or set run.dir to another disk"
    one = _checkpoint_bytes(needs.model)
    if free < DISK_LEAST:
        yield Finding("FAIL", "disk", found, f"{DISK_LEAST >> 20} MiB", advice)
    elif free < 2 * one:
        needed = f"{gib(2 * one)} for two checkpoints of about {gib(one)}"
        yield Finding("note", "disk", found, needed, advice)
    else:
        needed = f"about {gib(one)} a checkpoint" if one > GIB / 10 else ""
        yield Finding("ok", "disk", found, needed)


def _checkpoint_bytes(model: Path | None) -> int:
    """Bytes of a checkpoint of a model in bf16; 0 where that is not known."""
    if model is None or not model.is_dir():
        return 0
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) * PER_PARAMETER // 2


def _clock(skew: float) -> Iterator[Finding]:
    now = time.time()
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    installed = Path(rlcore.__file__).stat().st_mtime
    if now < installed:
        advice = "set the clock: certificates and the times of files are judged by it"
        yield Finding("note", "clock", f"{found}, before rlcore was installed", "", advice)
    elif abs(skew) > SKEW_S:
        advice = "have both follow NTP: a run tells old files from new ones by their time"
        found = f"{found}; the file system's is {skew:+.0f} s off"
        yield Finding("note", "clock", found, f"within {SKEW_S:g} s", advice)
    else:
        yield Finding("ok", "clock", found)
