"""Forks Python processes for scripts from parents that have imported all: a rank costs no imports.

    process = start(script, [argument], environment, log)

The result has `poll`, `wait`, `kill` and `returncode`, as a Popen. Two parents with different hash
seeds take turns, so that ranks which iterate over a set in different orders are still found.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests import fork_server
from tests.fork_server import ForkServer

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
HASH_SEEDS = ("1", "2")
PR_SET_PDEATHSIG = 1


class Forked(fork_server.Forked):
    """One of the processes, to who started it."""

    def __init__(self, parent: ForkServer, pid: int) -> None:
        super().__init__(pid)
        self._parent = parent

    def exit_code(self) -> int | None:
        code: int | None = self._parent.ask(poll=self.pid)
        return code


@cache
def parents() -> list[ForkServer]:
    """The processes that fork, which end with this one."""
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [ForkServer(Path(__file__), {**common, "PYTHONHASHSEED": seed}) for seed in HASH_SEEDS]


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
    parent = parents()[int(environment.get("RANK", "0")) % len(HASH_SEEDS)]
    return Forked(parent, parent.ask(
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
    if "poll" in question:
        return fork_server.Forked(question["poll"]).exit_code()
    return fork(question)


if __name__ == "__main__":
    fork_server.serve(PRELOADED, answer)
