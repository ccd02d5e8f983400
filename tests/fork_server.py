"""Both sides of a process that has imported everything and forks others: none imports again.

The tests' side is a `ForkServer`, whose script answers a line of JSON by another one in `serve`.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
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
POLL_S = 0.02


class ForkServer:
    """The tests' side: starts `script`, which imports meanwhile, and ends it with `close`."""

    def __init__(self, script: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, bufsize=1, env=dict(environment),
        )  # fmt: skip
        self._is_ready = False

    def send(self, job: Mapping[str, Any]) -> None:
        if not self._is_ready:
            self._is_ready = self.answer() == {"ready": True}
            assert self._is_ready
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        # which knows no largest descriptor
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        assert answers.poll(ANSWER_S * 1000), f"no answer in {ANSWER_S} s"
        line = self._process.stdout.readline()
        assert line, f"{self._process.args} has ended with code {self._process.wait(10)}"
        return json.loads(line)

    def ask(self, **job: Any) -> Any:
        self.send(job)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


class Forked:
    """A process that this one has forked, as far as a `subprocess.Popen` is used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def exit_code(self) -> int | None:
        """Return how it ended, once it has."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.exit_code()
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(modules: Iterable[str], run: Callable[[dict[str, Any]], Any]) -> None:
    """The script's side: import the modules, then answer each job by `run(job)`."""
    for module in modules:
        importlib.import_module(module)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def orphans() -> list[str]:
    """Return what still runs below this process, which adopts every orphan, and end it."""
    deadline = time.monotonic() + ORPHANS_S
    while left := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            break
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S / 2)
    described = [f"{process.pid} {' '.join(command_of(process))}" for process in left]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return described
