"""A run of a few steps on a cluster's nodes, a rank on each."""

from __future__ import annotations

import json
import sys
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

from tests.integration.rank_runs import InFolder
from tests.integration.workspace import ROOT, learned
from tests.network.cluster import Cluster
from tests.ports import free_port

LIMIT_S = 400.0  # for a run, on a busy machine
ENVIRONMENT = {
    "GPUS_PER_NODE": "1",
    "PYTHON": sys.executable,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # nodes end so soon after the head
    # Ray looks for a head at this address among all processes of the machine
    "RAY_PORT": str(free_port()),
    "RAY_AUTH_TOKEN": "of these nodes, 32 characters long",
}


class Nodes(InFolder):
    """A run named `nodes`, in the cluster's folder."""

    def __init__(self, cluster: Cluster, model: Path, *given: str) -> None:
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

    @property
    @abstractmethod
    def said(self) -> str:
        """What it has printed."""

    @property
    @abstractmethod
    def is_over(self) -> bool: ...

    @property
    def steps(self) -> int:
        return len(self.rows) if (self.folder / "metrics.jsonl").exists() else 0

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < deadline, self.said
            assert not self.is_over, self.said
            time.sleep(0.05)

    def check(self, steps: int) -> list[dict[str, str]]:
        """It has trained all steps. Returns its metrics without times."""
        deadline = time.monotonic() + LIMIT_S
        while not self.is_over:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
        assert (self.result["status"], self.result["steps"]) == ("completed", steps), self.said
        assert [row["step"] for row in self.rows] == list(range(1, steps + 1))
        return learned(self.rows)
