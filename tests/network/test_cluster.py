"""Runs on nodes with networks of their own, whose names stand for loopback at home."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.workspace import ROOT
from tests.network.cluster import Cable, Cluster, why_not
from tests.network.workload import ENVIRONMENT, Nodes

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(why_not()), reason=f"no nodes on this machine: {why_not()}"),
]
CUT_S = 10.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(2, tmp_path)
    yield made
    made.close()


class Scripts(Nodes):
    """A run by one of the scripts for several nodes."""

    def __init__(self, cluster: Cluster, script: str, model: Path, *given: str) -> None:
        super().__init__(cluster, model, *given)
        self.logs = [cluster.folder / f"node-{node}.log" for node in range(2)]
        shared = {**ENVIRONMENT, "NNODES": "2", "MASTER_ADDR": "node-0"}
        command = [str(ROOT / "scripts" / script), *self.arguments]
        self.agents = [
            cluster.start(node, command, self.logs[node], {**shared, "NODE_RANK": str(node)})
            for node in range(2)
        ]

    @property
    def said(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    @property
    def is_over(self) -> bool:
        codes = [agent.poll() for agent in self.agents]
        return None not in codes or any(codes)


@pytest.mark.parametrize("script", ["torchrun_multinode.sh", "ray_multinode.sh"])
def test_names_that_stand_for_loopback_at_home(
    cluster: Cluster, tiny_model: Path, script: str
) -> None:
    """And a first network card that leads nowhere: ranks, store and service reach one another."""
    nodes = () if script.startswith("torchrun") else ("cluster.nodes=2",)
    job = Scripts(cluster, script, tiny_model, "training.steps=2", *nodes)
    job.check(2)
    assert "192.168.66." not in job.said


# Each datagram that comes back has passed the cable twice.
DATAGRAMS = """
import json, socket, sys, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 4000))
if sys.argv[1] == "echo":
    while True:
        own.sendto(*own.recvfrom(100))
own.settimeout(1.0)
for attempt in range(30):
    own.sendto(b"0", (sys.argv[1], 4000))
    try:
        own.recv(100)
        break
    except TimeoutError:
        pass
back = []
for batch in range(20):
    for number in range(50):
        own.sendto(json.dumps(time.monotonic()).encode(), (sys.argv[1], 4000))
    try:
        while True:
            back.append(-json.loads(own.recv(100)) + time.monotonic())
    except TimeoutError:
        pass
print(json.dumps(back))
"""


def test_a_cable_is_as_slow_and_loses_as_much_as_it_says(tmp_path: Path) -> None:
    cluster = Cluster(2, tmp_path, Cable(delay_s=0.02, loss=0.1, bytes_per_s=125e6))
    try:
        program = [sys.executable, "-c", DATAGRAMS]
        cluster.start(1, [*program, "echo"], tmp_path / "echo.log", {})
        done = cluster.run(0, [*program, cluster.address(1)], {}, 60)
        back = json.loads(done.stdout)
    finally:
        cluster.close()
    assert min(back) >= 0.04
    assert 0.74 < len(back) / 1000 < 0.88


def test_a_cable_that_is_out_for_ten_seconds(cluster: Cluster, tiny_model: Path) -> None:
    """Nothing is lost, and nobody counts as lost."""
    job = Scripts(cluster, "torchrun_multinode.sh", tiny_model, "training.steps=60")
    job.until(lambda: job.steps >= 2)
    cluster.cut(1)
    time.sleep(CUT_S)
    cluster.mend(1)
    job.check(60)
