"""Runs `rlcore train` again and again without paying for the imports again: `python resume_driver.py`, a job a line.

Each job runs in a child forked from a process that has imported everything and started no thread. A job may name a point
and a call of it at which the child kills itself with SIGKILL, or seconds after which it is killed from outside. The answer
is a line: how the child ended, how long it took, and how often each point was passed.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

# Every stage at which a kill could leave something half done: name -> (module, object in it).
POINTS = {
    "prompts": ("rollout.service", "RolloutService.next_step"),
    "score": ("backends.megatron.backend", "MegatronBackend.score"),
    "update": ("backends.megatron.backend", "MegatronBackend.update"),
    "journal": ("rlcore.publish", "VersionJournal.next"),
    "publish": ("rollout.wire", "EngineSink.send"),
    "evaluate": ("rollout.service", "RolloutService.evaluate"),
    "log": ("rlcore.runs.metrics", "MetricsFile.append"),
    "rollouts": ("rlcore.runs.directory", "RunDirectory.write_rollouts"),
    "begin": ("rlcore.runs.checkpoints", "CheckpointStore.begin"),
    "shards": ("backends.megatron.checkpoint", "write_sharded"),
    "state": ("rlcore.runs.checkpoints", "CheckpointStore.write_state"),
    "commit": ("rlcore.runs.checkpoints", "CheckpointStore.commit"),
    "prune": ("rlcore.runs.checkpoints", "remove_tree"),
    "export": ("backends.megatron.backend", "MegatronBackend.export_hf"),
    "result": ("rlcore.runs.directory", "RunDirectory.write_result"),
    "rename": ("os", "rename"),
    "replace": ("os", "replace"),
    "fsync": ("os", "fsync"),
}


def kill_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch(passed: Counter[str], point: str, call: int, *, after: bool) -> None:
    """Count every point; before or after call number `call` (from 1) of `point`, die."""

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            passed[name] += 1
            mine = name == point and passed[name] == call
            if mine and not after:
                kill_here()
            result = real(*args, **kwargs)
            if mine:
                kill_here()
            return result

        return counted

    for name, (module, path) in POINTS.items():
        owner: Any = importlib.import_module(module)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, wrap(name, getattr(owner, attribute)))


def tear_line(call: int) -> None:
    """Die in the middle of writing line number `call` of metrics.jsonl."""
    from rlcore.runs import metrics

    real, written = metrics._line, Counter[str]()

    def line(row: Any) -> bytes:
        written["lines"] += 1
        if written["lines"] == call:
            (path,) = Path(os.environ["RESUME_RUN"]).glob("metrics.jsonl")
            with path.open("ab") as file:
                file.write(real(row)[:40])
            kill_here()
        return real(row)

    metrics._line = line


def run_job(job: dict[str, Any]) -> int:
    from rlcore.cli import main

    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    passed: Counter[str] = Counter()
    kill = job.get("kill", {})
    if kill.get("point") == "torn line":
        os.environ["RESUME_RUN"] = job["run"]
        tear_line(kill["call"])
    else:
        watch(passed, kill.get("point", ""), kill.get("call", 0), after=kill.get("after", False))
    code = main(job["arguments"])
    Path(job["log"]).with_suffix(".passed").write_text(json.dumps(passed))
    return code


def child(job: dict[str, Any]) -> int:
    try:
        return run_job(job)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def serve(job: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(child(job))
    limit = threading.Timer(job["kill_after_s"], os.kill, (pid, signal.SIGKILL)) if "kill_after_s" in job else None
    if limit is not None:
        limit.start()
    _, status = os.waitpid(pid, 0)
    if limit is not None:
        limit.cancel()
        limit.join()
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.perf_counter() - began}


def main() -> None:
    import rlcore.launch.compose  # noqa: F401
    from backends.megatron import backend  # noqa: F401
    from rollout import service  # noqa: F401

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
