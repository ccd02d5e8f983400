"""Run a program with a deadline, its output in a log; say how long it took and how much memory it needed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.05


class ProgramFailedError(RuntimeError):
    """The program ended with an error or was stopped at its deadline; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Finished:
    seconds: float
    peak_bytes: int                     # resident set of the program or of its largest child


def run(command: Sequence[str | Path], *, log: Path, threads: int, deadline_s: float, cwd: Path | None = None) -> Finished:
    """Wait for `command`. Raises ProgramFailedError when it fails or takes longer than `deadline_s`."""
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
    with log.open("wb") as output:
        # A session of its own, so that at the deadline its children can be stopped with it.
        child = subprocess.Popen(words, stdout=output, stderr=output, env=environment, cwd=cwd, start_new_session=True)
        try:
            status, peak_bytes = _wait(child.pid, started + deadline_s)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    seconds = time.monotonic() - started
    if status is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise ProgramFailedError(_failure(words, f"took longer than {deadline_s:.0f} s and was stopped", log))
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise ProgramFailedError(_failure(words, f"ended with exit code {child.returncode}", log))
    return Finished(seconds, peak_bytes)


def _wait(pid: int, until: float) -> tuple[int | None, int]:
    """wait4 tells the peak memory of this one child, which neither Popen.wait nor RUSAGE_CHILDREN does."""
    while time.monotonic() < until:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage.ru_maxrss * 1024
        time.sleep(POLL_SECONDS)
    return None, 0


def _failure(words: Sequence[str], what: str, log: Path) -> str:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    return f"`{' '.join(words)}` {what}; the end of {log}:\n{tail}"
