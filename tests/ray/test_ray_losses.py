"""Losses under Ray beyond that of a process: nodes, hangs, two parts at once.

Runs end as the undisturbed one does.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.integration.workspace import Run
from tests.ray.clusters import add_node, late_node, lose_node, node_of
from tests.ray.ray_runs import (
    COMMON,
    STEPS,
    Going,
    RayRuns,
    balance,
    check_as_undisturbed,
    until,
    until_gone,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SILENCE_S = 30.0
RANKS_START_S = 15.0  # until they wait for their engines
RESTARTED = "restart 1 of 3 (cluster.max_restarts)"
HEARTBEAT = f"cluster.heartbeat_timeout_s={SILENCE_S:g}"


def test_a_service_lost_while_an_engine_comes_up_finds_it_coming(
    ray_runs: RayRuns, local: Run
) -> None:
    """The engine's server is delayed until a new service has asked for it."""
    servers: list[int] = []

    def lose_both(going: Going) -> None:
        ended = going.server_pid()
        service = going.service_pid()
        os.kill(ended, signal.SIGKILL)
        until(lambda: going.server_pid() != ended)
        servers.append(going.server_pid())
        os.kill(servers[0], signal.SIGSTOP)
        os.kill(service, signal.SIGKILL)
        assert not until_gone({service}, within_s=20)
        until(lambda: going.engine_states() == ["starting"])
        time.sleep(1)
        assert going.engine_states() == ["starting"]
        os.kill(servers[0], signal.SIGCONT)

    run = ray_runs.train(
        "both_come_up",
        *COMMON,
        "rollout.engine.restart.backoff_s=0.1",
        acts=[(3, lose_both), (7, lambda going: servers.append(going.server_pid()))],
    )
    check_as_undisturbed(run, local)
    assert servers[0] == servers[1], "it was started once"
    assert not run.lines(RESTARTED)


def test_a_rank_lost_while_an_engine_comes_up_leaves_it_coming(
    ray_runs: RayRuns, local: Run
) -> None:
    """The first start of the engine's server is delayed until the restarted ranks wait for it."""
    servers: list[int] = []

    def lose(going: Going) -> None:
        until(lambda: going.engine_states() == ["starting"] and bool(going.server_pid()))
        servers.append(going.server_pid())
        os.kill(servers[0], signal.SIGSTOP)
        before = set(going.rank_pids())
        going.kill_rank(1)
        until(lambda: len(going.rank_pids()) == 2 and not before & set(going.rank_pids()))
        time.sleep(RANKS_START_S)
        assert going.engine_states() == ["starting"]
        os.kill(servers[0], signal.SIGCONT)

    run = ray_runs.train(
        "rank_lost_early",
        *COMMON,
        acts=[(0, lose), (7, lambda going: servers.append(going.server_pid()))],
    )
    check_as_undisturbed(run, local)
    assert servers[0] == servers[1], "it was started once"
    assert run.lines(RESTARTED)


def test_a_new_service_needs_no_engine_that_the_run_goes_on_without(ray_runs: RayRuns) -> None:
    states: list[list[str]] = []

    def lose_both(going: Going) -> None:
        log = going.run.folder / "logs" / "engine_1.log"
        log.unlink()
        log.mkdir()  # its server cannot be started any more
        os.kill(going.server_pid(1), signal.SIGKILL)
        until(lambda: going.engine_states()[1:] == ["dead"])
        going.kill_service()

    run = ray_runs.train(
        "goes_on_with_one",
        *COMMON,
        "rollout.engine.count=2",
        "rollout.engine.restart.limit=1",
        acts=[(3, lose_both), (7, lambda going: states.append(going.engine_states()))],
    )
    assert run.code == 0, run.err
    assert balance(run, STEPS)["consumed"] == 4 * STEPS
    assert states == [["serving", "dead"]]
    assert not run.lines(RESTARTED)


def test_a_rank_that_hangs_starts_all_again(ray_runs: RayRuns, local: Run) -> None:
    run = ray_runs.train(
        "rank_hangs", *COMMON, HEARTBEAT, acts=[(3, lambda going: going.stop_rank(1))]
    )
    check_as_undisturbed(run, local)
    (said,) = run.lines(RESTARTED)
    assert "rank 1 failed: it has been silent for" in said


def test_rollouts_that_come_too_late_are_no_loss(ray_runs: RayRuns) -> None:
    run = ray_runs.train("late", *COMMON, "rollout.timeout_s=0.01")
    assert run.code == 1
    assert run.lines("(rollout.timeout_s)")
    assert not run.lines("restart")
    assert run.result["status"] == "failed"


def test_the_engine_of_a_lost_node_is_started_on_another(
    ray_runs: RayRuns, cluster: Any, local: Run
) -> None:
    nodes: list[str] = []

    def lose(going: Going) -> None:
        node = node_of(cluster, going.engine_pid())
        nodes.append(node.node_id)
        lose_node(cluster, node)

    def look(going: Going) -> None:
        nodes.append(node_of(cluster, going.engine_pid()).node_id)

    run = ray_runs.train(
        "engine_node_lost",
        *COMMON,
        "rollout.engine.restart.backoff_s=0.1",
        acts=[(3, lose), (7, look)],
    )
    add_node(cluster)
    check_as_undisturbed(run, local)
    assert nodes[0] != nodes[1]
    assert sum(row["rollout/engine_restarts"] for row in run.metrics) == 1
    assert not run.lines(RESTARTED)


def test_rank_0_and_the_service_are_lost_with_one_node(
    ray_runs: RayRuns, cluster: Any, local: Run
) -> None:
    """The run resumes from the checkpoint in its folder."""
    large = add_node(cluster, cpus=8)
    with late_node(cluster, cpus=8) as join:

        def lose(going: Going) -> None:
            assert {node_of(cluster, pid) for pid in going.rank_pids()} == {large}
            join()
            lose_node(cluster, large)

        run = ray_runs.train("both_lost", *COMMON, "cluster.ray.rank_cpus=3", acts=[(5, lose)])
    check_as_undisturbed(run, local)
    assert len(run.lines(RESTARTED)) == 1


def test_ahead_of_the_trainer_nothing_is_lost_and_nothing_too_old(ray_runs: RayRuns) -> None:
    """A service and then a rank are killed, two steps ahead; no token is too old."""
    run = ray_runs.train(
        "ahead",
        *COMMON,
        "rollout.max_staleness=2",
        "cluster.ray.engine_cpus=0.5",
        acts=[(3, Going.kill_service), (5, lambda going: going.kill_rank(0))],
    )
    assert run.code == 0, run.err
    assert len(run.lines(RESTARTED)) == 1
    assert balance(run, STEPS)["consumed"] == 4 * STEPS
    assert 0 < max(row["rollout/staleness_max"] for row in run.metrics if row["step"]) <= 2
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
