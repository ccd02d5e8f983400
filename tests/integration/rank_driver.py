"""Runs `rlcore ARGUMENTS` with several ranks, a job a line, without importing again for each.

Everything is imported here once. Each job is forked from this process, and so are its ranks, in
advance: the supervisor then hands them the environment and the arguments with which it would have
started `python -m rlcore`. A rank is the supervisor's child, as always. The answer to a job:

    {"arguments": [...], "ranks": 2, "log": PATH}
    {"code": 1, "orphans": [], "orphans_seconds": 0.1}

PATH gets what the job and its ranks write to the terminal. PATH.pids gets the process ids: the
supervisor's, then the ranks'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import fork_server
from tests.fork_server import Forked
from tests.limits import adopt_orphans
from tests.nccl_rules import install_if_asked

PRELOADED = (
    "transformers.models.qwen3.modeling_qwen3",
    "backends.megatron.backend",
    "rlcore.launch.rank",
    "rlcore.launch.local",
    "rlcore.launch.input_checks",
    "rollout.engines.embedded.engine",
    "rollout.engines.embedded.client",
    "rollout.fleet.publication",
)


class Rank(Forked):
    """A rank that waits for its arguments; to the supervisor it is a `subprocess.Popen`."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        super().__init__(os.fork())
        if self.pid == 0:
            os.close(self._writer)
            given = os.fdopen(reader).readline()
            os._exit(run_rank(**json.loads(given)) if given else 0)
        os.close(reader)

    def begin(self, arguments: Sequence[str], environment: dict[str, str]) -> Rank:
        with os.fdopen(self._writer, "w") as pipe:
            pipe.write(
                json.dumps({"arguments": list(arguments), "environment": environment}) + "\n"
            )
        return self


def run_rank(arguments: list[str], environment: dict[str, str]) -> int:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    install_if_asked()
    return run(arguments)


def run(arguments: list[str]) -> int:
    from rlcore.cli import main

    try:
        return main(arguments)
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:  # noqa: BLE001  what Python itself would print on its way out
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_job(job: dict[str, Any]) -> int:
    from rlcore.launch import local as supervise

    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job.get("environment", {}))
    ranks = [Rank() for _ in range(job["ranks"])]
    waiting = iter(ranks)
    supervise.subprocess = _Starter(waiting)  # type: ignore[assignment, attr-defined]
    Path(job["log"] + ".pids").write_text(json.dumps([os.getpid(), *(rank.pid for rank in ranks)]))
    return run(job["arguments"])


class _Starter:
    """`subprocess`, as far as the supervisor uses it."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, waiting: Any) -> None:
        self._waiting = waiting

    def Popen(self, command: list[str], *, env: dict[str, str], start_new_session: bool) -> Rank:
        assert command[:3] == [sys.executable, "-m", "rlcore"]
        assert start_new_session
        rank: Rank = next(self._waiting)
        return rank.begin(command[3:], env)


def serve(given: dict[str, Any]) -> dict[str, Any]:
    pid = os.fork()
    if pid == 0:
        os._exit(run_job(given))
    job = Forked(pid)
    try:
        job.wait(fork_server.LIMIT_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
    ended_at = time.monotonic()
    left = fork_server.orphans()
    return {"code": job.returncode, "orphans": left, "orphans_seconds": time.monotonic() - ended_at}


if __name__ == "__main__":
    adopt_orphans()
    fork_server.serve(PRELOADED, serve)
