"""Ray clusters on this machine: every node is a raylet with its own workers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from rlcore.launch.ray.calls import NAMESPACE
from tests.integration.workspace import ROOT

# of each; our runs collect their logs themselves
NODE = {"object_store_memory": 100 << 20, "include_log_monitor": False}
_addresses = count(2)


@contextmanager
def new_cluster() -> Iterator[Any]:
    """`ray.cluster_utils.Cluster` of a head with one CPU."""
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    # Workers that are not runs' own get the path of this checkout from here.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        TemporaryDirectory(prefix="ray", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", path)
        patch.setenv("RAY_TMPDIR", folder)  # a socket's path must be short
        head = {"num_cpus": 1, "include_dashboard": False, "no_monitor": True, **NODE}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield made
        finally:
            made.shutdown()


@contextmanager
def connected_to(address: str) -> Iterator[None]:
    """This process is a driver of the cluster."""
    import ray

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def add_node(cluster: Any, *, cpus: int = 2, gpus: int = 0) -> Any:
    """With an address of its own: a driver is taken to be on the node that has its address."""
    return cluster.add_node(
        num_cpus=cpus, num_gpus=gpus, node_ip_address=f"127.0.0.{next(_addresses)}", **NODE
    )


def lose_node(cluster: Any, node: Any) -> None:
    """With everything on it, as a machine that loses its power."""
    cluster.remove_node(node, allow_graceful=False)


@contextmanager
def late_node(cluster: Any, *, cpus: int) -> Iterator[Callable[[], None]]:
    """Let another node join, without waiting, from any thread (`add_node`: the main thread)."""
    command = [
        *(
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            f"--address={cluster.address}",
        ),
        *(f"--num-cpus={cpus}", f"--node-ip-address=127.0.0.{next(_addresses)}"),
        f"--object-store-memory={NODE['object_store_memory']}",
    ]
    started: list[psutil.Popen] = []
    try:
        yield lambda: started.append(
            psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
    finally:
        for process in started:
            for one in (*process.children(recursive=True), process):
                one.kill()
            process.wait(timeout=30)


def node_of(cluster: Any, pid: int) -> Any:
    """The cluster's node that runs the process of an actor: a child of its raylet."""
    raylet = psutil.Process(pid).ppid()
    return next(
        node
        for node in cluster.list_all_nodes()
        if any(info.process.pid == raylet for info in node.all_processes["raylet"])
    )
