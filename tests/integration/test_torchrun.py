"""torchrun as the launcher: the same run as under our own supervisor, on one node or two, and an end when a rank dies."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab import LEARNING, ROOT, Lab
from rank_runs import InFolder, RankRuns

LIMIT_S = 150.0
TWO_RANKS = ("policy.parallel.tensor=2", *LEARNING, "rollout.engine.in_process=true")


@dataclass
class Launched(InFolder):
    """The agents of a run, one a node."""

    agents: Sequence[subprocess.Popen[bytes]]
    logs: Sequence[Path]
    folder: Path

    def wait(self) -> list[int]:
        deadline = time.monotonic() + LIMIT_S
        return [agent.wait(timeout=max(1.0, deadline - time.monotonic())) for agent in self.agents]

    @property
    def said(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def rank(self, rank: int) -> psutil.Process:
        return next(p for agent in self.agents for p in psutil.Process(agent.pid).children()
                    if p.environ().get("RANK") == str(rank))  # fmt: skip

    def processes(self) -> list[str]:
        """Everything that still runs for this run, agents not counted."""
        agents, found = {agent.pid for agent in self.agents}, []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):        # a zombie counts as such
                command = " ".join(process.cmdline())
                if process.pid not in agents and f"run.name={self.folder.name}" in command:
                    found.append(command)
        return found

    def kill(self) -> None:
        for agent in self.agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)


class Launcher:
    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.launched: list[Launched] = []

    def torchrun(self, name: str, *arguments: str) -> Launched:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
                   "-m", "rlcore", "train"]  # fmt: skip
        return self._start(name, [(command, {})], arguments)

    def two_nodes(self, name: str, *arguments: str) -> Launched:
        shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GPUS_PER_NODE": "1",
                  "PYTHON": sys.executable}  # fmt: skip
        script = [str(ROOT / "scripts" / "torchrun_multinode.sh")]
        return self._start(name, [(script, {**shared, "NODE_RANK": str(node)}) for node in range(2)], arguments)

    def _start(self, name: str, commands: Sequence[tuple[list[str], dict[str, str]]], arguments: Sequence[str]) -> Launched:
        given, agents, logs = [str(self.lab.base), f"run.name={name}", *arguments], [], []
        for node, (command, environment) in enumerate(commands):
            logs.append(self.folder / f"{name}-{node}.log")
            with logs[-1].open("wb") as log:
                agents.append(subprocess.Popen(
                    [*command, *given], stdout=log, stderr=log, start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
                ))  # fmt: skip
        self.launched.append(Launched(agents, logs, self.lab.folder / "runs" / name))
        return self.launched[-1]


@pytest.fixture
def launcher(lab: Lab, tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(lab, tmp_path)
    yield made
    for launched in made.launched:
        launched.kill()


@pytest.fixture(scope="module")
def supervised(rank_runs: RankRuns) -> list[dict[str, Any]]:
    """Metrics of the same run under our own supervisor."""
    run = rank_runs.train("supervised", *TWO_RANKS)
    assert run.code == 0, run.said
    return run.rows


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_same_metrics(rows: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Every metric but times and speeds, to round-off."""
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for key in row:
            if not key.startswith(("time/", "perf/")):
                assert math.isclose(row[key], other[key], rel_tol=1e-5, abs_tol=1e-6), (row["step"], key, row[key], other[key])
    assert any(row["train/grad_norm"] > 0 for row in rows)


def test_two_nodes_of_the_multi_node_script(launcher: Launcher, supervised: list[dict[str, Any]]) -> None:
    run = launcher.two_nodes("two-nodes", *TWO_RANKS)
    assert run.wait() == [0, 0], run.said
    assert "TP 2 x PP 1 x DP 1 on 2 cpu ranks" in run.logs[0].read_text()
    assert "run two-nodes" not in run.logs[1].read_text(), "rank 0 alone speaks"
    assert run.result["status"] == "completed"
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert_same_metrics(run.rows, supervised)
    assert run.processes() == []


@pytest.mark.full
def test_torchrun_on_one_node_needs_no_setting(launcher: Launcher, supervised: list[dict[str, Any]]) -> None:
    """The launcher is recognised; the engine has its own process, as under our supervisor."""
    run = launcher.torchrun("one-node", *TWO_RANKS, "rollout.engine.in_process=false")
    assert run.wait() == [0], run.said
    assert run.result["status"] == "completed"
    assert (run.folder / "logs" / "engine_0.log").exists()
    assert_same_metrics(run.rows, supervised)
    assert run.processes() == []


@pytest.mark.full
def test_a_rank_that_dies_ends_the_run(launcher: Launcher) -> None:
    run = launcher.torchrun("dead-rank", *TWO_RANKS, "training.steps=100000")
    deadline = time.monotonic() + 60
    while not (run.folder / "metrics.jsonl").exists() or len(run.rows) < 2:
        assert time.monotonic() < deadline, run.said
        time.sleep(0.05)
    run.rank(1).kill()
    killed = time.monotonic()
    assert run.wait() == [1], run.said
    assert time.monotonic() - killed < 30
    assert "rlcore: rank 0 lost a peer in a collective" in run.said
    assert run.result["status"] == "failed"
    assert run.result["reason"].endswith("not heard of any more: rank 1")
    assert run.processes() == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("policy.parallel.tensor=4", "tensor 4 x pipeline 1 x context 1 = 4 does not divide the world size 2"),
        ("rollout.filters=[zero]", "rollout.filters: 'zero' is unknown"),
    ],
    ids=["seen by every rank", "seen by rank 0"],
)
def test_bad_input_is_said_once(launcher: Launcher, wrong: str, says: str) -> None:
    run = launcher.torchrun("torchrun-bad-input", *TWO_RANKS, wrong)
    assert run.wait() == [1], "torchrun's own exit code; the rank's is 2"
    said = [line for line in run.said.splitlines() if line.startswith("rlcore: ")]
    assert len(said) == 1
    assert says in said[0]
    assert "exitcode  : 2" in run.said
    assert not run.folder.exists()
    assert run.processes() == []
