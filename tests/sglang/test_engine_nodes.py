"""Two trainer nodes and an engine node, by the real scripts, meet in a shared folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollout.engines.factories import ADMIN_KEY, API_KEY
from tests.integration.accounting_checks import check_accounting
from tests.integration.resume_driver import free_port
from tests.integration.workspace import LEARNING, ROOT, Run, Workspace

STEPS = 6
LIMIT_S = 250.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_engines_apart_outlive_a_restart_of_the_trainer(
    tmp_path: Path, tiny_model: Path, nodes: list[subprocess.Popen[bytes]]
) -> None:
    workspace = Workspace(tmp_path, tiny_model)
    servers = tmp_path / "servers.yaml"
    servers.write_text(
        "rollout: {engine: {kind: sglang, device: cpu, threads: 1, start_timeout_s: 250}}\n"
    )
    shared = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HOST_ADDRESS": "127.0.0.1",
        API_KEY: "one key for requests, of this test",
        ADMIN_KEY: "another for control, of this test",
        "ENGINES": str(tmp_path / "engines"),
        "ENGINE_NODES": "1",
        "NNODES": "2",
        "GPUS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MAX_RESTARTS": "1",
    }

    def start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [
            str(ROOT / "scripts" / script),
            str(workspace.base),
            "run.name=apart",
            *arguments,
        ]
        with (tmp_path / f"{len(nodes)}.log").open("wb") as log:
            given = {**shared, **environment}
            nodes.append(
                subprocess.Popen(command, env=given, stdout=log, stderr=log, start_new_session=True)
            )
        return nodes[-1]

    engines = start("engines.sh", str(servers))
    settings = (
        *LEARNING,
        "policy.parallel.tensor=2",
        f"training.steps={STEPS}",
        "checkpoint.every=2",
        "rollout.engine.start_timeout_s=60",
    )
    trainers = [start("torchrun_multinode.sh", *settings, NODE_RANK=str(node)) for node in range(2)]
    metrics = tmp_path / "runs" / "apart" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline, said(tmp_path)
        time.sleep(0.05)
    for rank in psutil.Process(trainers[1].pid).children():
        rank.kill()
    assert [trainer.wait(LIMIT_S) for trainer in trainers] == [0, 0], said(tmp_path)

    run = Run(0, "", "", tmp_path / "runs" / "apart")
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    assert all(row["rollout/train_rollout_logprob_diff"] < 1e-5 for row in run.metrics)
    check_accounting(run, steps=STEPS)
    assert engines.poll() is None, said(tmp_path)
    engines.send_signal(signal.SIGTERM)
    assert engines.wait(60) == 0
    assert list((tmp_path / "engines").glob("*.json")) == []


def said(folder: Path) -> str:
    return "".join(f"== {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log")))
