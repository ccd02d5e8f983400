"""Runs `rlcore train` as `python resume_driver.py`, a job a line, without importing again for each.

Each job is forked from a process that has imported everything and started no thread. A job may name
a point and a call of it at which its processes are killed with SIGKILL, several such points for
what two threads do, or a file after whose growth, and some seconds, they are. The answer is a line
too: how the job ended, and which processes it left behind. A file beside its log gets how often it
passed each point.
"""

from __future__ import annotations

import errno
import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.errors import RlcoreError
from tests import fork_server
from tests.fork_server import Forked
from tests.limits import adopt_orphans, forbid_large_files
from tests.ports import free_port

# Every stage that a kill could leave half done: name -> (module, function in it).
POINTS = {
    "rollouts": ("rollout.service", "RolloutService.next_step"),
    "score": ("backends.megatron.backend", "MegatronBackend.score"),
    "update": ("backends.megatron.backend", "MegatronBackend.update"),
    "version": ("rlcore.trainer.weight_publisher", "VersionJournal.next"),
    "publish": ("rlcore.trainer.sender_ranks", "SenderRanks.send"),
    "evaluation": ("rollout.service", "RolloutService.evaluate"),
    "metrics": ("rlcore.runs.metrics", "MetricsFile.append"),
    "samples": ("rlcore.runs.rollouts", "write_rollouts"),
    "begin": ("rlcore.runs.checkpoints", "CheckpointStore.begin"),
    "shards": ("backends.megatron.checkpoint.shards", "PlannedShards.write"),
    "copy": ("backends.megatron.checkpoint.shards", "plan_sharded"),
    "complete": ("backends.megatron.backend", "MegatronBackend.finish_save"),
    "state": ("rlcore.runs.checkpoints", "CheckpointStore.write_state"),
    "commit": ("rlcore.runs.checkpoints", "CheckpointStore.commit"),
    "flush": ("rlcore.runs.checkpoints", "sync_tree"),
    "prune": ("rlcore.runs.checkpoints", "CheckpointStore._prune"),
    "remove": ("rlcore.runs.checkpoints", "remove_tree"),
    "export": ("backends.megatron.backend", "MegatronBackend.export_hf"),
    "write export": ("rlcore.hf_folder", "_write"),
    "result": ("rlcore.runs.directory", "RunDirectory.write_result"),
    "rename": ("os", "rename"),
    "replace": ("os", "replace"),
    "journal start": ("rollout.accounting.prompt_queue", "LedgerJournal.start"),
    "journal cut": ("rollout.accounting.prompt_queue", "LedgerJournal.cut"),
    "fsync": ("os", "fsync"),
    "write shard": ("megatron.core.dist_checkpointing.strategies.filesystem_async", "_write_item"),
}
POLL_S = 0.01
FILE_LIMIT = 60_000  # bytes: less than the model has, more than any log
HOLD_S = 100.0  # for one thread to come to where another waits for it
PRELOADED = (
    "transformers.models.qwen3.modeling_qwen3",
    "rlcore.data.tokenizer",
    "rlcore.launch.rank",
    "rollout.engines.embedded.engine",
    "backends.megatron.backend",
)


# --- inside a job ---------------------------------------------------------------------------------


def kill_all() -> None:
    os.killpg(0, signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def hold() -> None:
    """Wait until another thread has done its part, where it is told to do so `while_held`."""
    held.set()
    released.wait(HOLD_S)


def wait_for_the_write(backend: Any) -> None:
    """Wait until the checkpoint in the background is written, or has failed."""
    deadline = time.monotonic() + HOLD_S
    with suppress(RlcoreError):
        while backend.save_seconds() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)


held = threading.Event()
released = threading.Event()
ACTIONS: dict[str, Callable[..., object]] = {
    "kill": kill_all, "terminate": terminate, "disk full": disk_full, "hold": hold,
    "nothing": lambda: None, "file limit": lambda: forbid_large_files(FILE_LIMIT),
}  # fmt: skip


def do(spec: dict[str, Any], *args: Any) -> None:
    """Do what `action` says, at the point that was called with `args`."""
    if spec.get("while_held"):
        held.wait(HOLD_S)
    action = spec.get("action", "kill")
    if action == "wait for the write":
        wait_for_the_write(args[0])
    else:
        ACTIONS[action]()
    if spec.get("while_held"):
        released.set()


def watch(passed: Counter[str], specs: list[dict[str, Any]]) -> None:
    """Count every point. At call number `call` (from 1) of `point`, do what `action` says."""

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def counted(*args: Any, **kwargs: Any) -> Any:
            passed[name] += 1
            here = [s for s in specs if s.get("point") == name and s["call"] == passed[name]]
            for spec in here:
                if not spec.get("after"):
                    do(spec, *args)
            result = real(*args, **kwargs)
            for spec in here:
                if spec.get("after"):
                    do(spec, *args)
            return result

        return counted

    for name, (module, path) in POINTS.items():
        owner: Any = importlib.import_module(module)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, wrap(name, getattr(owner, attribute)))


def tear_line(passed: Counter[str], call: int) -> None:
    """Die in the middle of line number `call` of metrics.jsonl."""
    from rlcore.runs.metrics import MetricsFile

    real = MetricsFile.append

    def append(self: MetricsFile, step: int, metrics: dict[str, float]) -> None:
        real(self, step, metrics)
        passed["torn line"] += 1
        if passed["torn line"] == call:
            os.truncate(self.path, self.path.stat().st_size - 30)
            kill_all()

    MetricsFile.append = append  # type: ignore[method-assign, assignment]


def tear_ledger(passed: Counter[str], call: int) -> None:
    """Die when half of what write number `call` to ledger.jsonl says is in it."""
    from rollout.accounting.prompt_queue import LedgerJournal

    real = LedgerJournal._write

    def write(self: LedgerJournal, *entries: dict[str, Any]) -> None:
        before = os.fstat(self._file or 0).st_size
        real(self, *entries)
        passed["torn ledger"] += 1
        if passed["torn ledger"] == call:
            os.ftruncate(self._file or 0, (before + os.fstat(self._file or 0).st_size + 1) // 2)
            kill_all()

    LedgerJournal._write = write  # type: ignore[method-assign, assignment]


def run_rank(job: dict[str, Any]) -> int:
    from rlcore.cli import main

    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["rlcore", *job["arguments"]]
    passed: Counter[str] = Counter()
    given = job.get("at", [])
    rank = int(os.environ.get("RANK", "0"))
    specs = [s for s in (given if isinstance(given, list) else [given]) if s.get("rank", 0) == rank]
    point = specs[0].get("point") if specs else None
    if point == "torn line":
        tear_line(passed, specs[0]["call"])
    elif point == "torn ledger":
        tear_ledger(passed, specs[0]["call"])
    else:
        watch(passed, specs)
    code = main(job["arguments"])
    if os.environ.get("RANK", "0") == "0":
        Path(job["log"] + ".passed").write_text(json.dumps(passed))
    return code


def run_forked(job: dict[str, Any]) -> int:
    try:
        return run_rank(job)
    except Exception:  # noqa: BLE001  whatever the run did not handle: a traceback in the job's log
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


# --- beside it ------------------------------------------------------------------------------------


def start(job: dict[str, Any]) -> list[int]:
    """The process ids of the ranks; they are one process group, led by the first."""
    ranks = job.get("ranks", 1)
    port = free_port()
    pids: list[int] = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            if ranks > 1:
                os.environ.update(
                    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                    LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                )  # fmt: skip
            os._exit(run_forked(job))
        # the child was quicker, or is gone already
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def lines_in(path: str) -> int:
    return Path(path).read_bytes().count(b"\n") if Path(path).exists() else 0


def wait(pids: list[int], outside: dict[str, Any] | None) -> list[int | None]:
    """Wait for the processes and return their exit codes.

    `outside`: all are killed so many `seconds` after `file` has so many `lines`.
    """
    began = time.monotonic()
    jobs = [Forked(pid) for pid in pids]
    due: float | None = None
    while None in [job.poll() for job in jobs]:
        if outside is not None and lines_in(outside["file"]) >= outside["lines"]:
            due = time.monotonic() + outside["seconds"]
            outside = None
        late = time.monotonic() - began > fork_server.LIMIT_S
        struck = due is not None and time.monotonic() >= due and jobs[0].returncode is None
        if late or struck:
            os.killpg(pids[0], signal.SIGKILL)
        time.sleep(POLL_S)
    return [job.returncode for job in jobs]


def serve(job: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    codes = wait(start(job), job.get("outside"))
    seconds = time.monotonic() - began
    left = fork_server.orphans()
    return {"codes": codes, "seconds": seconds, "orphans": left}


if __name__ == "__main__":
    adopt_orphans()
    fork_server.serve([*PRELOADED, *(module for module, _ in POINTS.values())], serve)
