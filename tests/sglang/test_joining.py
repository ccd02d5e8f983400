"""A real server comes into a run that goes on, answers with its weights, and leaves it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_kit import START_S, Served

from rollout.engines.factories import ADMIN_KEY, API_KEY
from rollout.fleet.engine_list import external_name
from tests.integration.accounting_checks import check_accounting
from tests.integration.workspace import LEARNING, Run, Workspace

GAP = "rollout/train_rollout_logprob_diff"
QUICK_S = 120.0  # on a busy machine, for what takes a second or two


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`started(name, *arguments)`: an `rlcore` command, whose output goes to the file `name`."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        with (tmp_path / name).open("wb") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "rlcore", *arguments],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def until(what: str, reached: Callable[[], object], seconds: float = QUICK_S) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"{what} after {seconds:g} s"
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_engine_comes_into_a_run_and_leaves_it(
    served: Served,
    tiny_model: Path,
    tmp_path: Path,
    started: Callable[..., subprocess.Popen[bytes]],
) -> None:
    workspace = Workspace(tmp_path, tiny_model)
    run = Run(0, "", "", workspace.folder / "runs" / "grows")
    keys = {API_KEY: served.keys.api, ADMIN_KEY: served.keys.admin}
    listed = tmp_path / "engines"
    listed.mkdir()
    (listed / "first.json").write_text(json.dumps([served.url]))
    engine = f"{{kind: sglang, urls_file: {listed}, start_timeout_s: {START_S}, logprobs_every: 1}}"
    training = started(
        "training",
        *("train", str(workspace.base), *LEARNING, "run.name=grows", "training.steps=100000"),
        *(f"rollout.engine={engine}", "rollout.service=process"),
        **keys,
    )
    until("no first step", lambda: run.folder.is_dir() and len(run.metrics) > 2, START_S)
    started(
        "engine",
        *("engine", str(workspace.base), "run.name=lent", "rollout.engine.kind=sglang"),
        *("rollout.engine.device=cpu", "rollout.engine.threads=1"),
        *("--urls-file", str(listed / "second.json")),
        **keys,
    )

    def serving() -> list[str]:
        rows = json.loads((run.folder / "logs" / "engines.json").read_bytes())
        return [row["engine"] for row in rows if row["state"] == "serving"]

    until("two engines do not serve", lambda: len(serving()) == 2, START_S)
    first, second = serving()
    assert first == external_name(served.url)
    status = workspace.command("status", str(run.folder))
    assert status.code == 0
    assert f"{second} at http://127.0.0.1:" in status.out
    joined_at = len(run.metrics)
    until("no later step", lambda: len(run.metrics) > joined_at + 3)

    (listed / "second.json").write_text("[]")
    until("the run still lists it", lambda: serving() == [first])
    left_at = len(run.metrics)
    until("no step without it", lambda: len(run.metrics) > left_at + 2)
    training.send_signal(signal.SIGTERM)
    assert training.wait(QUICK_S) == 130, (tmp_path / "training").read_text()

    assert all(row[GAP] < 1e-5 for row in run.metrics if row["step"])
    served_by = [int(row["rollout/engines_serving"]) for row in run.metrics if row["step"]]
    assert served_by[0] == served_by[-1] == 1
    assert served_by.count(2) >= 3
    check_accounting(run, steps=run.metrics[-1]["step"])
