"""Runs programs that stand for machines: each has a session, a log and an environment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from process import ProgramFailedError, failure

POLL_S = 0.2
# for what is left when a run has ended: Ray's nodes take up to a minute to see that their head is
# gone
END_S = 120.0
REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(REPOSITORY),
}


@dataclass(frozen=True)
class Program:
    """A node, by name. One that `lasts` serves the others until it is told to end."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    lasts: bool = False


def run_together(programs: Sequence[Program], logs: Path, *, deadline_s: float) -> float:
    """Run all programs until the first one, which trains, has ended. Returns its seconds.

    Raises ProgramFailedError where one fails, ends too early, or takes longer than `deadline_s`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    children = [_start(program, logs) for program in programs]
    try:
        while children[0].poll() is None:
            for program, child in zip(programs, children, strict=True):
                if child.poll() is not None and (child.returncode or program.lasts):
                    raise _failed(
                        program, f"ended with exit code {child.returncode}, before the run", logs
                    )
            if time.monotonic() - began > deadline_s:
                raise _failed(
                    programs[0], f"took longer than {deadline_s:.0f} s (--deadline)", logs
                )
            time.sleep(POLL_S)
        seconds = time.monotonic() - began
        for program, child in zip(programs, children, strict=True):
            if program.lasts:
                child.send_signal(signal.SIGTERM)
            if (code := _wait(child)) != 0:
                what = (
                    f"goes on {END_S:.0f} s after the run"
                    if code is None
                    else f"ended with exit code {code}"
                )
                raise _failed(program, what, logs)
        return seconds
    finally:
        for child in children:
            _end(child)


def _start(program: Program, logs: Path) -> subprocess.Popen[bytes]:
    with (logs / f"{program.name}.log").open("wb") as log:
        return subprocess.Popen(
            list(program.words), stdout=log, stderr=log, cwd=REPOSITORY, start_new_session=True,
            env={**os.environ, **SHARED, **program.environment},
        )  # fmt: skip


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(END_S)
    except subprocess.TimeoutExpired:
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """With everything below it, in sessions of their own too; of one that has ended, what is left
    of its session.
    """
    if child.poll() is None:
        for process in psutil.Process(child.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _failed(program: Program, what: str, logs: Path) -> ProgramFailedError:
    return ProgramFailedError(failure(program.words, what, logs / f"{program.name}.log"))
