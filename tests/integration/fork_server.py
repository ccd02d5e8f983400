"""Both sides of a process that has imported everything and forks a job for each line.

The answer to a job, a line too, says how it ended and which processes it left behind.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.process_facts import command_of

ORPHANS_S = 60.0  # in which everything that a job started must be gone
LIMIT_S = 300.0  # for one job, on a busy machine
ANSWER_S = LIMIT_S + ORPHANS_S + 40.0
POLL_S = 0.01
PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The tests' side: starts `script`, and ends it with `close`."""

    def __init__(self, script: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, bufsize=1, env=dict(environment),
        )  # fmt: skip
        assert self.answer() == {"ready": True}

    def send(self, job: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # which knows no largest descriptor
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        assert answers.poll(ANSWER_S * 1000), f"no answer in {ANSWER_S} s"
        line = self._process.stdout.readline()
        assert line, f"the process has ended with code {self._process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def serve(modules: Iterable[str], run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The script's side: import the modules, then answer each job by `run(job)`."""
    for module in modules:
        importlib.import_module(module)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def orphans() -> list[str]:
    """Return what still runs below this process, which inherits every orphan, and end it."""
    deadline = time.monotonic() + ORPHANS_S
    while left := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            break
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)
    described = [f"{process.pid} {' '.join(command_of(process))}" for process in left]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return described
