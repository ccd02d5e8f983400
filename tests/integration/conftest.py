"""Fixtures of the integration tests: a workspace, and runs in other processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for workspace.py and the like

from rank_runs import RankRuns
from torchrun_runs import Launcher
from workspace import Workspace

from tests.integration.resume_runs import Runs


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Workspace]:
    threads = torch.get_num_threads()
    yield Workspace(tmp_path_factory.mktemp("workspace"), tiny_model)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Runs]:
    """Each module has its own: names of runs are its own too."""
    runs = Runs(tmp_path_factory.mktemp(Path(request.path).stem), tiny_model)
    yield runs
    runs.close()


@pytest.fixture(scope="session")
def rank_runs(tmp_path_factory: pytest.TempPathFactory, workspace: Workspace) -> Iterator[RankRuns]:
    runs = RankRuns(tmp_path_factory.mktemp("rank_runs"), workspace.base, workspace.folder / "runs")
    yield runs
    runs.close()


@pytest.fixture
def launcher(workspace: Workspace, tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(workspace, tmp_path)
    yield made
    made.close()
