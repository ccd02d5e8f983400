"""Runs under the ray launcher in this process, and what is done to them while they go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray

from rlcore.launch.ray.calls import NAMESPACE, actor_name
from tests.integration.lab import LEARNING, Lab, Run

REACH_S = 240.0
TWO_RANKS = ("policy.parallel.tensor=2", "cluster.processes_per_node=2", "rollout.engine.in_process=false", *LEARNING)
STEPS = 8
COMMON = (*TWO_RANKS, f"training.steps={STEPS}", "checkpoint.every=2")      # of runs that end alike


class Going:
    """A run that goes on, seen from a thread of the driver's own process."""

    def __init__(self, run: Run) -> None:
        self.run, self.name = run, run.folder.name

    def reach(self, step: int) -> None:
        """Wait until `step` is in the log."""
        path, deadline = self.run.folder / "metrics.jsonl", time.monotonic() + REACH_S
        while not path.exists() or sum('"step"' in line for line in path.read_text().splitlines()) < step:
            assert time.monotonic() < deadline, f"no step {step} in {REACH_S} s"
            time.sleep(0.02)

    def actor(self, part: str) -> Any:
        return ray.get_actor(actor_name(self.name, part), namespace=NAMESPACE)

    def ranks(self) -> list[dict[str, Any]]:
        facts: dict[str, Any] = ray.get(self.actor("board").read.remote(), timeout=30)
        return list(facts["ranks"])

    def kill_rank(self, rank: int) -> None:
        os.kill(self.ranks()[rank]["pid"], signal.SIGKILL)

    def kill_service(self) -> None:
        os.kill(ray.get(self.actor("service").status.remote(), timeout=30)[0], signal.SIGKILL)

    def kill_engine(self) -> None:
        """The actor that owns it."""
        server = ray.get(self.actor("engine-0").pid.remote(), timeout=30)
        psutil.Process(server).parent().kill()      # type: ignore[union-attr]


class RayRuns:
    """`rlcore train` on the cluster at `address`, in this process."""

    def __init__(self, lab: Lab, address: str) -> None:
        self.lab, self.address = lab, address

    def train(self, name: str, *arguments: str, acts: Sequence[tuple[int, Callable[[Going], object]]] = ()) -> Run:
        """Run to the end; once step `acts[i][0]` is in the log, do `acts[i][1]`."""
        going = Going(Run(0, "", "", self.lab.folder / "runs" / name))
        failed: list[BaseException] = []

        def act() -> None:
            try:
                for step, do in acts:
                    going.reach(step)
                    do(going)
            except BaseException as error:  # noqa: BLE001  for the test, which raises it
                failed.append(error)

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        run = self.lab.train(name, "cluster.launcher=ray", f"cluster.ray.address={self.address}", *arguments)
        thread.join(timeout=10)
        if failed:
            raise AssertionError(f"{failed[0]!r}; the run said: {run.out}{run.err}") from failed[0]
        return run


def command(*arguments: str) -> str:
    """What `rlcore ARGUMENTS` prints, in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "rlcore", *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def learned(run: Run) -> list[dict[str, Any]]:
    """The rows of the log without what depends on the clock, and on engines that were started again."""
    return [
        {name: value for name, value in row.items()
         if not name.startswith(("time/", "perf/", "rollout/engine", "rollout/retried", "rollout/resumed"))}
        for row in run.metrics
    ]  # fmt: skip


def weights(run: Run) -> bytes:
    """The exported policy."""
    return (run.folder / "hf" / "model.safetensors").read_bytes()


def balance(run: Run, step: int) -> dict[str, int]:
    """Of the ledger, which agrees with the checkpoint of `step`, the newest, with the recordings and with the versions."""
    from rlcore.runs.directory import RunDirectory
    from rollout.audit import audit

    found = audit(RunDirectory(run.folder))
    assert found.contradictions == []
    assert found.checkpoint == found.steps == found.recorded == step
    return found.states


def check_as_undisturbed(run: Run, local: Run) -> None:
    """Of a run of COMMON: metrics, weights and books are those of `local`."""
    assert run.code == 0, run.err
    assert run.result["status"] == "completed"
    assert learned(run) == learned(local)
    assert weights(run) == weights(local)
    assert balance(run, STEPS)["consumed"] == 4 * STEPS
