"""One Ray cluster for all tests here: a head and three nodes, each a raylet on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.workspace import Run, Workspace
from tests.ray.clusters import add_node, new_cluster
from tests.ray.ray_runs import COMMON, RayRuns

NODES = 3


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Workspace]:
    threads = torch.get_num_threads()
    yield Workspace(tmp_path_factory.mktemp("workspace"), tiny_model)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Beside the head three nodes with room for two ranks or engines each."""
    with new_cluster() as made:
        for _ in range(NODES):
            add_node(made)
        yield made


@pytest.fixture(scope="session")
def ray_runs(workspace: Workspace, cluster: Any) -> RayRuns:
    return RayRuns(workspace, cluster.address)


@pytest.fixture(scope="session")
def local(workspace: Workspace) -> Run:
    """The undisturbed run, of processes that the local launcher starts."""
    run = workspace.train("local", *COMMON)
    assert run.code == 0, run.err
    return run
