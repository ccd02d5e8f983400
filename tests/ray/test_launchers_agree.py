"""Two torchrun agents learn what local processes and Ray's actors (test_ray_runs.py) learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torchrun_runs import Launched, Launcher
from tests.integration.workspace import Run, Workspace
from tests.ray.ray_runs import COMMON, STEPS, RayRuns, balance, weights

CLOCK = ("time/", "perf/")


@pytest.fixture
def launcher(workspace: Workspace, tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(workspace, tmp_path)
    yield made
    made.close()


def unclocked(run: Run) -> list[dict[str, Any]]:
    """Every row of metrics.jsonl, without the columns that say how long things took."""
    return [
        {name: value for name, value in row.items() if not name.startswith(CLOCK)}
        for row in run.metrics
    ]


def finished(run: Launched) -> Run:
    assert run.wait() == [0, 0], run.said
    return Run(0, run.said, "", run.folder)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_all_launchers_learn_the_same_to_the_bit(
    launcher: Launcher, local: Run, ray_runs: RayRuns
) -> None:
    nodes = [setting for setting in COMMON if not setting.startswith("cluster.")]
    agents = finished(launcher.two_nodes("agents", *nodes))
    actors = ray_runs.train("actors", *COMMON)
    assert actors.code == 0, actors.err
    for run in (agents, actors):
        assert [row.keys() for row in run.metrics] == [row.keys() for row in local.metrics]
        assert unclocked(run) == unclocked(local)
        assert weights(run) == weights(local)
        assert balance(run, STEPS) == balance(local, STEPS)
    assert len(unclocked(local)[-1]) > 40
    assert all(row["train/grad_norm"] > 0 for row in local.metrics)
