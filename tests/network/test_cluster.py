"""Runs on nodes with networks of their own, whose names stand for loopback at home."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.runs.metrics import read_metrics
from tests.integration.workspace import ROOT, learned
from tests.network.cluster import Cluster, why_not

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(why_not()), reason=f"no nodes on this machine: {why_not()}"),
]
LIMIT_S = 400.0  # for a run, on a busy machine
CUT_S = 10.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(2, tmp_path)
    yield made
    made.close()


class Job:
    """A run by one of the scripts for several nodes."""

    def __init__(self, cluster: Cluster, script: str, model: Path, *given: str) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "runs" / "nodes"
        rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
        data = cluster.folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.arguments = [
            "run.name=nodes",
            f"run.dir={cluster.folder / 'runs'}",
            "run.threads=1",
            f"model.path={model}",
            "model.dtype=fp32",
            f"data.paths={data}",
            "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=4",
            "rollout.sampling.max_new_tokens=6",
            "reward.parts.digits.function=tests.integration.resume_rewards:share_of_digits",
            "policy.optimizer.lr=1e-3",
            *given,
        ]
        shared = {
            "NNODES": "2",
            "MASTER_ADDR": "node-0",
            "GPUS_PER_NODE": "1",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_TOKEN": "of these nodes, 32 characters long",
        }
        self.logs = [cluster.folder / f"node-{node}.log" for node in range(2)]
        self.agents = [
            cluster.start(
                node,
                [str(ROOT / "scripts" / script), *self.arguments],
                self.logs[node],
                {**shared, "NODE_RANK": str(node)},
            )
            for node in range(2)
        ]

    @property
    def said(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < deadline, self.said
            assert all(agent.poll() in (None, 0) for agent in self.agents), self.said
            time.sleep(0.05)

    def check(self, steps: int) -> list[dict[str, str]]:
        """It has trained all steps. Returns its metrics without times."""
        self.until(lambda: all(agent.poll() is not None for agent in self.agents))
        result = json.loads((self.folder / "result.json").read_bytes())
        assert (result["status"], result["steps"]) == ("completed", steps)
        return learned(self.metrics)


@pytest.mark.parametrize("script", ["torchrun_multinode.sh", "ray_multinode.sh"])
def test_names_that_stand_for_loopback_at_home(
    cluster: Cluster, tiny_model: Path, script: str
) -> None:
    """And a first network card that leads nowhere: ranks, store and service reach one another."""
    nodes = () if script.startswith("torchrun") else ("cluster.nodes=2",)
    job = Job(cluster, script, tiny_model, "training.steps=2", *nodes)
    rows = job.check(2)
    assert "192.168.66." not in job.said
    assert len(rows) == 2


def test_a_cable_that_is_out_for_ten_seconds(cluster: Cluster, tiny_model: Path) -> None:
    """Nothing is lost, and nobody counts as lost."""
    job = Job(cluster, "torchrun_multinode.sh", tiny_model, "training.steps=60")
    job.until(lambda: len(job.metrics) >= 2)
    cluster.cut(1)
    time.sleep(CUT_S)
    cluster.mend(1)
    assert len(job.check(60)) == 60
