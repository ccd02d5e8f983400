"""Whole runs of two or three ranks and two engines on one GPU, all over NCCL: they repeat.

Needs NCCL 2.30, which takes several ranks on one GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
from one_gpu.groups import PIPES, lacks_nccl, multi_process_service
from one_gpu.runs import EXAMPLE, MEAN_GAP, RUN_DEADLINE_S, STEPS, Runs, lacks_packages, prepare
from one_gpu.section import Found, Setting

ENGINE = "rollout.engines.embedded.server"
AT_ONCE = 5
LIMIT_S = 100.0  # of a run on a GPU
Ways = dict[str, tuple[Callable[..., float | None], tuple[str, ...]]]


def runs_of_two_ranks(setting: Setting) -> Found:
    """Make the runs, and compare their weights."""
    found = Found()
    if lacks_packages(found) or lacks_nccl(setting, found):
        return found
    runs = Runs(setting, deadline_s=LIMIT_S if setting.cuda else RUN_DEADLINE_S)
    prepare(runs)
    alike = (
        str(EXAMPLE / "base.yaml"), str(EXAMPLE / "grpo.yaml"), "cluster.processes_per_node=2",
        "rollout.service=process", "rollout.engine.count=2", "rollout.engine.senders=2",
        "rollout.engine.restart.backoff_s=0.1", f"model.dtype={setting.size.dtype}",
        "run.deterministic=true", f"training.steps={STEPS}", "checkpoint.every=2",
        "checkpoint.export_hf=true", "evaluation.every=0", "evaluation.paths=[]",
        "policy.optimizer.lr=1e-3",
    )  # fmt: skip
    tensor = (*alike, "policy.parallel.tensor=2")
    same: Ways = {
        "tensor": (runs.train, tensor),
        "again": (runs.train, tensor),
        "one sender": (runs.train, (*tensor, "rollout.engine.senders=1")),
        "two rails": (runs.train, (*tensor, "rollout.engine.senders=1", "rollout.engine.rails=2")),
    }
    three = (*alike, "cluster.processes_per_node=3", "rollout.engine.senders=1")
    # one rank sends, one helps, and rank 0 helps through its link
    of_three: Ways = {
        "three ranks": (runs.train, (*three, "rollout.engine.rails=1")),
        "three rails": (runs.train, (*three, "rollout.engine.rails=3")),
    }
    others: Ways = {
        "pipeline": (runs.train, (*alike, "policy.parallel.pipeline=2")),
        "data": (runs.train, (*alike, "policy.optimizer.distributed=true")),
    }
    killed: Ways = {
        "killed": (runs.train_killed, tensor),
        "an engine killed": (partial(_lose_an_engine, runs), tensor),
    }
    with multi_process_service(setting):
        _make({**same, **others, **of_three}, found)
    os.environ.pop(PIPES, None)  # a process that is killed may take others of its service along
    _make(killed, found)
    for name in [*same, *killed][1:]:
        differs = runs.weights(name) != runs.weights("tensor")
        found.check(f"ranks: weights of {name!r} differ from the first", float(differs), 0.0)
    differs = runs.weights("three rails") != runs.weights("three ranks")
    found.check("ranks: weights of 'three rails' differ from 'three ranks'", float(differs), 0.0)
    for name in ("tensor", *others, *of_three):
        gap = max(row["rollout/train_rollout_logprob_diff"] for row in runs.rows(name))
        found.check(f"ranks: mean log-prob gap of {name!r}", gap, MEAN_GAP)
    restarts = sum(row.get("rollout/engine_restarts", 0) for row in runs.rows("an engine killed"))
    found.check("ranks: engines that were not started again", abs(1.0 - restarts), 0.0)
    return found


def _make(ways: Ways, found: Found) -> None:
    """Make runs, a few at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = {
            name: pool.submit(make, name, *arguments) for name, (make, arguments) in ways.items()
        }
        for name, future in made.items():
            if (seconds := future.result()) is not None:
                found.number(f"ranks: {name}", seconds, "s", "beside others")


def _lose_an_engine(runs: Runs, name: str, *arguments: str) -> None:
    """Kill the engine that was started last, after the first step."""
    process = runs.start(name, *arguments, until=2)
    below = psutil.Process(process.pid).children(recursive=True)
    engines = [each for each in below if ENGINE in each.cmdline()]
    max(engines, key=lambda each: each.create_time()).send_signal(signal.SIGKILL)
    runs.done(process)
