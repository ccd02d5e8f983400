"""scripts/slurm/torchrun.sbatch as a job of two local nodes; only Slurm is not real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun_runs import free_port
from workspace import LEARNING, ROOT, Workspace

from rlcore.runs.metrics import read_metrics
from tests.slurm_stubs import job, write_stubs


@pytest.mark.full
def test_a_job_trains_and_a_job_that_was_put_back_goes_on(
    workspace: Workspace, tmp_path: Path
) -> None:
    write_stubs(tmp_path)
    environment = {
        **os.environ, **job(2), "PREFIX": "127.0.0", "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "SLURM_SUBMIT_DIR": str(ROOT), "ENGINE_NODES": "0", "GPUS_PER_NODE": "1",
        "MAX_RESTARTS": "0",
    }  # fmt: skip
    given = [
        str(workspace.base),
        "run.name=by-slurm",
        *LEARNING,
        "policy.parallel.tensor=2",
        "rollout.service=in_process",
    ]

    def submit(*arguments: str, **more: str) -> str:
        done = subprocess.run(
            [str(ROOT / "scripts" / "slurm" / "torchrun.sbatch"), *given, *arguments], timeout=200,
            env={**environment, "MASTER_PORT": str(free_port()), **more}, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    folder = workspace.folder / "runs" / "by-slurm"
    assert "TP 2 x PP 1 x DP 1 on 2 cpu ranks" in submit("training.steps=2", "checkpoint.every=1")
    assert "resuming after step 2" in submit("training.steps=3", SLURM_RESTART_COUNT="1")
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((folder / "result.json").read_text())["status"] == "completed"
