"""Forks Python processes for scripts from parents that have imported all: a rank costs no imports.

    process = start(script, [argument], environment, log)

The result has `poll`, `wait`, `kill` and `returncode`, as a Popen. Two parents with different hash
seeds take turns, so that ranks which iterate over a set in different orders are still found.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "megatron.core.dist_checkpointing.strategies.torch",
    "backends.megatron.backend",
    "rlcore.config.load",
    "rlcore.trainer.credit",
    "tests.nccl_rules",
)
HASH_SEEDS = (1, 2)
POLL_S = 0.02
PR_SET_PDEATHSIG = 1


class Parent:
    """A process that forks others, one for each `start`; all end with this process."""

    def __init__(self, hash_seed: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": str(hash_seed),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"{__file__} has ended; what it said is on the terminal"
        return json.loads(answer)


class Forked:
    """One of the processes, to who started it."""

    def __init__(self, parent: Parent, pid: int) -> None:
        self._parent = parent
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@cache
def parent(number: int) -> Parent:
    return Parent(HASH_SEEDS[number])


def start(
    script: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Forked | subprocess.Popen[bytes]:
    """`python SCRIPT ARGUMENTS`, with its output in `log`; ranks take turns between the parents."""
    if "RANKS_DEVICE" in environment:  # beside GPUs: who has asked for them cannot fork
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    chosen = parent(int(environment.get("RANK", "0")) % len(HASH_SEEDS))
    return Forked(chosen, chosen.ask(
        script=str(script), arguments=list(arguments), environment=dict(environment), log=str(log)
    ))  # fmt: skip


# --- the parent's side ----------------------------------------------------------------------------


def fork(job: dict[str, Any]) -> int:
    """The child's pid; the child itself runs the script and leaves as any interpreter does."""
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, log, log)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(job["environment"])
    script = job["script"]
    paths = job["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.path.dirname(script), *paths, *sys.path[1:]]
    sys.argv[:] = [script, *job["arguments"]]
    from tests.nccl_rules import install_if_asked

    install_if_asked()
    runpy.run_path(script, run_name="__main__")
    raise SystemExit(0)


def answer(question: dict[str, Any]) -> int | None:
    if "poll" not in question:
        return fork(question)
    pid, status = os.waitpid(question["poll"], os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def main() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    words = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=words, flush=True)


if __name__ == "__main__":
    main()
