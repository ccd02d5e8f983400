"""`rlcore engine --nodes 2`: one engine whose tensor-parallel ranks are on two machines.

Both are on loopback here: SGLang's processes do not know.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import server_kit

from rollout.engines.child_process import members
from rollout.engines.factories import ADMIN_KEY, API_KEY
from tests.integration.held_estimator import held
from tests.integration.resume_driver import free_port
from tests.integration.workspace import LEARNING, ROOT, Workspace

KEYS = {
    API_KEY: "one key for requests, of this test",
    ADMIN_KEY: "another for control, of this test",
}
STEPS = 5


class Machines:
    """The command on two machines."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.urls = [folder / f"urls-{rank}.json" for rank in range(2)]
        self.head = f"127.0.0.1:{free_port()}"
        self.logs = [folder / f"{rank}.log" for rank in range(2)]
        self.processes = [self._start(base, rank) for rank in range(2)]

    def _start(self, base: Path, rank: int) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "rlcore", "engine", str(base), "run.name=machines"),
            *("rollout.engine.kind=sglang", "rollout.engine.device=cpu"),
            *("rollout.engine.threads=1", "rollout.engine.tensor_parallel=2"),
            *("rollout.engine.restart.backoff_s=1", "rollout.engine.restart.limit=8"),
            f"rollout.engine.start_timeout_s={server_kit.START_S}",
            *("--nodes", "2", "--node-rank", str(rank), "--head", self.head),
            *("--urls-file", str(self.urls[rank])),
        ]
        with self.logs[rank].open("wb") as log:
            environment = {**os.environ, **KEYS, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def url(self) -> str:
        ends = time.monotonic() + server_kit.START_S
        while not all(path.exists() for path in self.urls):
            assert time.monotonic() < ends, self.said
            assert all(process.poll() is None for process in self.processes), self.said
            time.sleep(0.1)
        [url], none = [json.loads(path.read_text()) for path in self.urls]
        assert none == []
        return str(url)

    def server(self, rank: int) -> psutil.Process:
        [server] = psutil.Process(self.processes[rank].pid).children()
        return server


@pytest.fixture
def machines(tmp_path: Path, tiny_model: Path) -> Iterator[tuple[Machines, Workspace]]:
    workspace = Workspace(tmp_path, tiny_model)
    found = Machines(tmp_path, workspace.base)
    yield found, workspace
    for process in found.processes:
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_engine_on_two_machines_trains_and_outlives_the_loss_of_one(
    machines: tuple[Machines, Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost machine takes the other's ranks along; both meet again, and get the weights."""
    nodes, workspace = machines
    url = nodes.url()
    servers = [nodes.server(rank).pid for rank in range(2)]
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    folder = workspace.folder / "runs" / "spanning"
    log = folder / "metrics.jsonl"
    acted = workspace.folder / "acted"

    def lose_the_second() -> None:
        while not log.exists() or log.read_bytes().count(b"\n") < 2:
            time.sleep(0.05)
        os.kill(servers[1], signal.SIGKILL)
        acted.touch()

    threading.Thread(target=lose_the_second, daemon=True).start()
    run = workspace.train(
        "spanning", *LEARNING, "rollout.engine.kind=sglang", f"rollout.engine.urls=['{url}']",
        "rollout.engine.tensor_parallel=2",
        f"training.steps={STEPS}", f"rollout.engine.start_timeout_s={server_kit.START_S}",
        "rollout.engine.restart.limit=20", "rollout.engine.restart.backoff_s=2",
        held(folder, {acted: 2}),
    )  # fmt: skip
    assert run.code == 0, run.err[-3000:] + nodes.said
    rows = [row for step, row in run.rows.items() if step > 0]
    assert len(rows) == STEPS
    assert max(row["rollout/train_rollout_logprob_diff"] for row in rows) < 1e-4
    assert sum(row.get("rollout/engine_restarts", 0) for row in rows) >= 1
    again = [nodes.server(rank).pid for rank in range(2)]
    assert not {*servers} & {*again}
    for process in nodes.processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in nodes.processes] == [0, 0]
    assert not any(members(pid) for pid in (*servers, *again))
    assert not any(path.exists() for path in nodes.urls)
