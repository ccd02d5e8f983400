"""One Ray cluster for all tests here: a head and three nodes, each a raylet with its own workers on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.integration.lab import ROOT, Lab

NODES = 3
STORE_BYTES = 100 << 20         # of each node's objects


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Lab]:
    threads = torch.get_num_threads()
    yield Lab(tmp_path_factory.mktemp("lab"), tiny_model)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def cluster() -> Iterator[object]:
    """`ray.cluster_utils.Cluster`. The head has room for a rollout service alone, every node for two ranks or engines."""
    from ray.cluster_utils import Cluster

    # Workers that are not runs' own get the path of this checkout from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    logging.getLogger("ray").setLevel(logging.ERROR)
    with TemporaryDirectory(prefix="ray", dir="/tmp") as folder:        # a socket's path must be short
        os.environ["RAY_TMPDIR"] = folder
        made = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES,
        })  # fmt: skip
        try:
            for _ in range(NODES):
                made.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
            yield made
        finally:
            made.shutdown()
