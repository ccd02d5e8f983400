"""Runs a program with a deadline and a log, and measures its time and the machine's load."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.05


class ProgramFailedError(RuntimeError):
    """The program ended with an error or was stopped at its deadline; the message ends with the
    tail of its log.
    """


@dataclass(frozen=True)
class Finished:
    seconds: float
    peak_bytes: int  # resident set of the program
    # cores that everything else on the machine kept busy meanwhile, on average
    other_cores: float


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    threads: int,
    deadline_s: float,
    cwd: Path | None = None,
) -> Finished:
    """Wait for `command`. Raises ProgramFailedError when it fails or takes longer than
    `deadline_s`.
    """
    words = [str(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    started = time.monotonic()
    busy_before = busy_seconds()
    with log.open("wb") as output:
        # A session of its own, so that at the deadline its children can be stopped with it.
        child = subprocess.Popen(
            words, stdout=output, stderr=output, env=environment, cwd=cwd, start_new_session=True
        )
        try:
            ended = _wait(child.pid, started + deadline_s)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    seconds = time.monotonic() - started
    if ended is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise ProgramFailedError(
            failure(words, f"took longer than {deadline_s:.0f} s and was stopped", log)
        )
    status, usage = ended
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise ProgramFailedError(failure(words, f"ended with exit code {child.returncode}", log))
    others = busy_seconds() - busy_before - usage.ru_utime - usage.ru_stime
    return Finished(seconds, usage.ru_maxrss * 1024, max(0.0, others / seconds))


def _wait(pid: int, until: float) -> tuple[int, resource.struct_rusage] | None:
    """Status and usage of this one child (Popen.wait gives no usage, RUSAGE_CHILDREN that of all);
    None: it still runs.
    """
    while time.monotonic() < until:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage
        time.sleep(POLL_SECONDS)
    return None


def busy_seconds() -> float:
    """CPU seconds that the whole machine has spent not idle; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
        int, stat.read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def code_of(main: Callable[[], int | None]) -> int | None:
    """Return the exit code of `main`, or print the program that failed and return 2."""
    try:
        return main()
    except ProgramFailedError as error:
        print(error, file=sys.stderr)
        return 2


def failure(words: Sequence[str], what: str, log: Path) -> str:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    return f"`{' '.join(words)}` {what}; the end of {log}:\n{tail}"
