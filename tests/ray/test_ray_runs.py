"""Whole runs on a Ray cluster of several raylets: bit-equal to a local run, whatever is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray

from tests.integration.workspace import Run, Workspace
from tests.listeners import programs
from tests.ray.clusters import add_node, lose_node, node_of
from tests.ray.ray_runs import (
    COMMON,
    STEPS,
    TWO_RANKS,
    Going,
    RayRuns,
    check_as_undisturbed,
    command,
)
from tests.timeline_checks import check_timeline


@pytest.mark.everyday
def test_a_run_on_a_cluster_equals_a_local_one(ray_runs: RayRuns, local: Run) -> None:
    seen: list[str] = []
    listening: dict[str, set[str]] = {}

    def ask(going: Going) -> None:
        with going.paused(after=2):
            listening.update(programs(*going.processes()))
            seen.extend(command("status", "--address", ray_runs.address).splitlines())

    run = ray_runs.train("thin", *COMMON, acts=[(0, ask)])
    check_as_undisturbed(run, local)
    # Ray listens on every interface; of ours, engines and gloo take the address of their node
    own = {name: where for name, where in listening.items() if name != "Ray itself"}
    here = ray.util.get_node_ip_address()
    elsewhere = {one for where in own.values() for one in where if not one.startswith("127.0.0.")}
    assert elsewhere <= {here}, own
    assert f"step {STEPS}/{STEPS}" in run.out
    assert {path.name for path in (run.folder / "logs").iterdir()} == {
        "rank_0.log", "rank_1.log", "service.log", "engine_0.log", "engines.json",
    }  # fmt: skip
    assert {path.name for path in (run.folder / "timeline").iterdir()} == {
        "rank_0.json.gz", "rank_1.json.gz", "service.json.gz",
    }  # fmt: skip
    groups = check_timeline(run.folder, run.rows)
    assert {"rank 0", "rank 1", "engine engine-0", "rewards", "publication"} <= set(groups)
    assert seen[0].startswith("thin: step ")
    assert [line.split()[0] for line in seen[1:]] == ["restarts", "rank", "rank", "engine-0"]


def test_a_lost_rank_starts_all_again_from_the_last_checkpoint(
    ray_runs: RayRuns, local: Run
) -> None:
    """Engines stay; the rollout service is started again with rank 0."""
    services: list[int] = []
    servers: list[int] = []

    def look(going: Going) -> None:
        services.append(going.service_pid())
        servers.append(going.server_pid())

    def kill(going: Going) -> None:
        look(going)
        going.kill_rank(1)

    run = ray_runs.train("rank_lost", *COMMON, acts=[(3, kill), (7, look)])
    check_as_undisturbed(run, local)
    assert services[0] != services[1]
    assert servers[0] == servers[1], "the engine was started again"
    assert len(run.lines("restart 1 of 3 (cluster.max_restarts)")) == 1


@pytest.mark.full
def test_a_run_gives_up_after_max_restarts(ray_runs: RayRuns) -> None:
    run = ray_runs.train(
        "given_up", *COMMON, "cluster.max_restarts=0", acts=[(2, lambda going: going.kill_rank(0))]
    )
    assert run.code == 1
    assert run.lines("rlcore: trainer rank 0 failed: its process or node is gone")
    assert run.result["status"] == "failed"


@pytest.mark.full
def test_a_lost_node_moves_its_ranks(ray_runs: RayRuns, cluster: Any, local: Run) -> None:
    nodes: list[str] = []

    def lose(going: Going) -> None:
        lost = node_of(cluster, going.rank_pids()[0])
        nodes.append(lost.node_id)
        lose_node(cluster, lost)

    run = ray_runs.train(
        "node_lost",
        *COMMON,
        acts=[(3, lose), (7, lambda going: nodes.append(going.ranks()[0]["node"]))],
    )
    add_node(cluster)
    check_as_undisturbed(run, local)
    assert nodes[0] != nodes[1]


@pytest.mark.full
def test_sigterm_and_rlcore_stop_save_and_end_the_run(ray_runs: RayRuns) -> None:
    long = (*TWO_RANKS, "training.steps=1000")
    run = ray_runs.train(
        "signalled", *long, acts=[(2, lambda going: os.kill(os.getpid(), signal.SIGTERM))]
    )
    assert run.code == 130
    assert run.result["status"] == "interrupted"
    assert run.checkpoint(run.result["steps"]).is_dir()
    said: list[str] = []
    run = ray_runs.train(
        "signalled",
        *long,
        "--resume",
        acts=[
            (
                run.result["steps"] + 2,
                lambda going: said.append(
                    command("stop", "signalled", "--address", ray_runs.address)
                ),
            )
        ],
    )
    assert run.code == 130
    assert said == ["run signalled has ended: continue it with --resume\n"]


def test_bad_input_is_one_line(ray_runs: RayRuns, workspace: Workspace) -> None:
    run = ray_runs.train("bad", *COMMON, "rollout.filters=nowhere:nothing")
    assert run.code == 2
    assert [
        line for line in run.err.splitlines() if line.startswith("rlcore: ")
    ] == run.err.splitlines()[-1:]
    assert not (run.folder / "config.yaml").exists()


def test_a_lack_of_room_on_the_cluster_is_reported(ray_runs: RayRuns) -> None:
    run = ray_runs.train(
        "large", *COMMON, "cluster.ray.engine_cpus=50", "cluster.start_timeout_s=2"
    )
    assert run.code == 1
    assert run.lines(
        "no room for the engines within 2 s (cluster.start_timeout_s): asked is [50 CPU]; it lacks"
    )
