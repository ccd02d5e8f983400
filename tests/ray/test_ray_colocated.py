"""Engines that take turns with the ranks of their own node, on several nodes.

Runs end as the undisturbed one on one node does, whose engine is apart.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.integration.workspace import Run
from tests.ray.clusters import add_node, lose_node, node_of
from tests.ray.ray_runs import COMMON, Going, RayRuns, check_as_undisturbed

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

# A rank and an engine on each of two nodes, which have no room for more.
TURNS = (
    *COMMON,
    *("cluster.nodes=2", "cluster.processes_per_node=1"),
    *("rollout.engine.colocated=true", "rollout.engine.count=2"),
    "rollout.engine.restart.backoff_s=0.1",
)


def nodes_of(cluster: Any, going: Going) -> tuple[list[str], list[str]]:
    """The nodes of the ranks, and those of the engines' actors."""
    hosts = [going.engine_pid(index) for index in range(2)]
    ranks = going.rank_pids()
    places = [[node_of(cluster, pid).node_id for pid in pids] for pids in (ranks, hosts)]
    return places[0], places[1]


def test_an_engine_of_the_second_node_that_dies_comes_back_there(
    ray_runs: RayRuns, cluster: Any, local: Run
) -> None:
    seen: list[tuple[list[str], list[str]]] = []

    def kill(going: Going) -> None:
        seen.append(nodes_of(cluster, going))
        os.kill(going.server_pid(1), signal.SIGKILL)

    def look(going: Going) -> None:
        seen.append(nodes_of(cluster, going))

    run = ray_runs.train("turns_engine_lost", *TURNS, acts=[(3, kill), (7, look)])
    check_as_undisturbed(run, local)
    assert seen[0] == seen[1]
    ranks, engines = seen[0]
    assert ranks == engines
    assert len(set(ranks)) == 2
    assert sum(row["rollout/engine_restarts"] for row in run.metrics) == 1
    assert all(row["time/handover"] > 0 for row in run.metrics)
    assert not run.lines("restart 1 of 3 (cluster.max_restarts)")


def test_a_lost_node_takes_its_ranks_and_engines_with_it(
    ray_runs: RayRuns, cluster: Any, local: Run
) -> None:
    """Both are started on another node, together."""
    seen: list[tuple[list[str], list[str]]] = []

    def lose(going: Going) -> None:
        seen.append(nodes_of(cluster, going))
        lose_node(cluster, node_of(cluster, going.rank_pids()[1]))

    def look(going: Going) -> None:
        seen.append(nodes_of(cluster, going))

    run = ray_runs.train("turns_node_lost", *TURNS, acts=[(3, lose), (7, look)])
    add_node(cluster)
    check_as_undisturbed(run, local)
    before, after = seen
    assert before != after
    for ranks, engines in seen:
        assert ranks == engines
        assert len(set(ranks)) == 2
    assert len(run.lines("restart 1 of 3 (cluster.max_restarts)")) == 1
