"""One Ray cluster for all tests here: a head and three nodes, each a raylet with its own workers on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.integration.lab import ROOT, Lab, Run
from tests.ray.ray_runs import COMMON, RayRuns

NODES = 3
NODE = {"object_store_memory": 100 << 20, "include_log_monitor": False}     # of each; our runs collect their logs themselves


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Lab]:
    threads = torch.get_num_threads()
    yield Lab(tmp_path_factory.mktemp("lab"), tiny_model)
    torch.set_num_threads(threads)


_addresses = count(2)


def add_node(cluster: Any, *, cpus: int = 2, gpus: int = 0) -> Any:
    """With an address of its own: a driver is taken to be on the node that has its address."""
    return cluster.add_node(num_cpus=cpus, num_gpus=gpus, node_ip_address=f"127.0.0.{next(_addresses)}", **NODE)


def lose_node(cluster: Any, node: Any) -> None:
    """With everything on it, as a machine that loses its power."""
    cluster.remove_node(node, allow_graceful=False)


@contextmanager
def new_cluster() -> Iterator[Any]:
    """`ray.cluster_utils.Cluster` of a head that has room for a rollout service alone."""
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    # Workers that are not runs' own get the path of this checkout from here.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with TemporaryDirectory(prefix="ray", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("RAY_TMPDIR", folder)          # a socket's path must be short
        head = {"num_cpus": 1, "include_dashboard": False, "no_monitor": True, **NODE}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Beside the head three nodes with room for two ranks or engines each."""
    with new_cluster() as made:
        for _ in range(NODES):
            add_node(made)
        yield made


@pytest.fixture(scope="session")
def ray_runs(lab: Lab, cluster: Any) -> RayRuns:
    return RayRuns(lab, cluster.address)


@pytest.fixture(scope="session")
def local(lab: Lab) -> Run:
    """The undisturbed run, of processes that the local launcher starts."""
    run = lab.train("local", *COMMON)
    assert run.code == 0, run.err
    return run
