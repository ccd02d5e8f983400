"""How runs on Ray end: with their driver, by requests, beside other runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rlcore.launch.ray import cluster as cluster_of_a_run
from rlcore.runs.directory import RunDirectory
from tests.integration.workspace import LEARNING
from tests.ray.clusters import add_node, connected_to, lose_node, node_of
from tests.ray.ray_runs import TWO_RANKS, Going, RayRuns, balance, command, until, until_gone

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

GONE_S = 60.0
AGENTS_GONE_S = 150.0  # Ray's own agents look for their head for a minute
WORKER = "reward.parts.right.function=exact_match"  # a reward that has processes of its own
ONE_RANK = ("rollout.service=process", *LEARNING)
LONG = "training.steps=1000"


def test_nothing_outlives_a_driver_that_is_killed(ray_runs: RayRuns) -> None:
    driver = ray_runs.start("orphaned", *TWO_RANKS, LONG, WORKER)
    going = ray_runs.going("orphaned")
    going.reach(2)
    with connected_to(ray_runs.address):
        pids = going.processes()
    assert len(pids) > 4, "two ranks, the service, the engine's actor, and what they started"
    os.kill(driver.pid, signal.SIGKILL)
    assert not until_gone(pids | {driver.pid}, within_s=GONE_S)
    assert command("status", "--address", ray_runs.address) == "no run is running\n"


def test_a_cluster_of_its_own_ends_with_a_driver_that_is_killed(ray_runs: RayRuns) -> None:
    driver = ray_runs.start("own", *TWO_RANKS, LONG, WORKER, "cluster.ray.address=local")
    ray_runs.going("own").reach(2)
    pids = {child.pid for child in psutil.Process(driver.pid).children(recursive=True)}
    assert len(pids) > 6, "with Ray's own"
    os.kill(driver.pid, signal.SIGKILL)
    assert not until_gone(pids | {driver.pid}, within_s=AGENTS_GONE_S)


def test_ctrl_c_during_the_start_ends_it_at_once(ray_runs: RayRuns) -> None:
    """The trainer has its room, and the engine waits for some."""
    acts = [(0, lambda _: os.kill(os.getpid(), signal.SIGINT))]
    run = ray_runs.train("early", *TWO_RANKS, LONG, "cluster.ray.engine_cpus=50", acts=acts)
    assert run.code == 130
    assert run.err.splitlines()[-1] == "rlcore: interrupted"
    assert not run.folder.exists()
    with connected_to(ray_runs.address):
        assert not [name for name in ray.util.list_named_actors() if name.startswith("early/")]
        assert {group["state"] for group in ray.util.placement_group_table().values()} == {
            "REMOVED"
        }


@pytest.mark.parametrize("start", ["_connect", "place"])
def test_sigterm_while_the_cluster_is_looked_for_is_an_interrupt(
    ray_runs: RayRuns, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """`ray.init` has a handler of its own, which ends the process with the signal's number."""
    original = getattr(cluster_of_a_run, start)

    def told(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(cluster_of_a_run, start, told)
    run = ray_runs.train("looked_for", *TWO_RANKS)
    assert run.code == 130
    assert run.err.splitlines()[-1] == "rlcore: interrupted"
    assert not run.folder.exists()


@pytest.mark.parametrize("wrong", ["{pip: [x], conda: y}", "{env_vars: [x]}"])
def test_a_runtime_environment_that_ray_does_not_take_is_bad_input(
    ray_runs: RayRuns, wrong: str
) -> None:
    run = ray_runs.train("wrong_environment", *TWO_RANKS, f"cluster.ray.runtime_env={wrong}")
    assert run.code == 2
    assert "cluster.ray.runtime_env: Ray rejects it: " in run.err


def test_a_second_stop_ends_a_run_that_hangs(ray_runs: RayRuns) -> None:
    said: list[str] = []

    def stop(going: Going) -> None:
        going.stop_rank(1)
        for seconds, code in (("5", 1), ("90", 0)):
            said.append(
                command(
                    "stop",
                    going.name,
                    "--address",
                    ray_runs.address,
                    "--timeout",
                    seconds,
                    code=code,
                )
            )

    run = ray_runs.train("hangs", *TWO_RANKS, LONG, acts=[(2, stop)])
    assert "a second `rlcore stop` ends it at once" in said[0]
    assert said[1] == "run hangs has ended: continue it with --resume\n"
    assert run.code == 130
    assert run.result["status"] == "interrupted"
    assert run.result["steps"] >= 2


def test_runs_share_a_cluster_but_no_name(ray_runs: RayRuns, tmp_path: Path) -> None:
    ended: list[tuple[int, str]] = []

    def beside(going: Going) -> None:
        other = ray_runs.start("second", *ONE_RANK)
        same = ray_runs.start(going.name, *ONE_RANK, f"run.dir={tmp_path}")
        for driver in (same, other):
            said = driver.communicate(timeout=300)[0]
            ended.append((driver.returncode, said))
        os.kill(os.getpid(), signal.SIGTERM)

    run = ray_runs.train("first", *ONE_RANK, LONG, acts=[(1, beside)])
    assert [code for code, _ in ended] == [2, 0], ended
    assert (
        ended[0][1]
        .splitlines()[-1]
        .startswith("rlcore: run 'first' is running on this cluster already: end it with")
    )
    assert balance(ray_runs.going("second").run, 3)["consumed"] == 12
    assert run.code == 130
    assert balance(run, run.result["steps"])["consumed"] == 4 * run.result["steps"]


def has_ended(going: Going, status: str = "completed") -> bool:
    result = RunDirectory(going.run.folder).read_result()
    return result is not None and result["status"] == status


def test_a_restart_without_room_fails_with_the_reason(ray_runs: RayRuns, cluster: Any) -> None:
    """Only one node was large enough."""
    large = add_node(cluster, cpus=8)
    limits = ("cluster.ray.rank_cpus=3.5", "cluster.start_timeout_s=90")
    run = ray_runs.train(
        "no_room", *TWO_RANKS, LONG, *limits, acts=[(2, lambda _: lose_node(cluster, large))]
    )
    assert run.code == 1
    assert run.lines("restart 1 of 3")
    assert run.lines(
        "rlcore: the Ray cluster has no room for the trainer within 90 s (cluster.start_timeout_s)"
    )
    assert run.result["status"] == "failed"
    assert run.result["reason"].startswith("the Ray cluster has no room for the trainer")
    assert run.result["steps"] >= 2


def test_ctrl_c_while_the_ranks_wait_for_room_again_is_an_interrupt(
    ray_runs: RayRuns, cluster: Any
) -> None:
    """Whatever rank 0, whose node is left, has said of the loss."""
    large = [add_node(cluster, cpus=8) for _ in range(2)]

    def lose(going: Going) -> None:
        lost = node_of(cluster, going.rank_pids()[1])
        lose_node(cluster, lost)
        # nor is the next run there
        until(lambda: lost.node_id not in {one["NodeID"] for one in ray.nodes() if one["Alive"]})
        until(lambda: not going.ranks())
        os.kill(os.getpid(), signal.SIGINT)
        large.remove(lost)

    apart = ("cluster.nodes=2", "cluster.processes_per_node=1", "cluster.ray.rank_cpus=7")
    run = ray_runs.train("waits", *TWO_RANKS, *apart, LONG, acts=[(2, lose)])
    cluster.remove_node(*large)
    assert run.code == 130
    assert run.lines("restart 1 of 3")
    assert run.result["status"] == "interrupted"


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("interrupted", 130)])
def test_a_rank_0_that_is_lost_after_the_result_undoes_nothing(
    ray_runs: RayRuns, status: str, code: int
) -> None:
    def kill(going: Going) -> None:
        pid = going.rank_pids()[0]
        if status == "interrupted":
            os.kill(os.getpid(), signal.SIGTERM)  # the driver's
        until(lambda: has_ended(going, status))
        os.kill(pid, signal.SIGKILL)

    steps = LONG if status == "interrupted" else "training.steps=30"
    run = ray_runs.train(f"over_{status}", *TWO_RANKS, steps, acts=[(1, kill)])
    assert run.code == code, run.err
    assert run.lines(
        "after the end of the run: an upload or a tracker's last record may be missing"
    )
    assert run.result["status"] == status


def test_a_signal_while_a_run_closes_changes_nothing(ray_runs: RayRuns) -> None:
    driver = ray_runs.start("closing", *TWO_RANKS, "training.steps=30")
    going = ray_runs.going("closing")
    going.reach(1)
    with connected_to(ray_runs.address):
        until(lambda: has_ended(going) and not going.ranks())
        driver.terminate()
    said = driver.communicate(timeout=60)[0]
    assert driver.returncode == 0, said


def test_a_cluster_that_wants_a_token_says_what_to_set(
    ray_runs: RayRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))  # where a token may lie
    wanted = (
        "refuses us: it wants a token (RAY_AUTH_MODE=token) and this process has none: set"
        " RAY_AUTH_TOKEN, or"
    )
    assert wanted in command("status", "--address", ray_runs.address, code=2).splitlines()[-1]
    driver = ray_runs.start("token", *ONE_RANK)
    said = driver.communicate(timeout=120)[0]
    assert driver.returncode == 2
    assert wanted in said.splitlines()[-1]


def test_early_stopping_is_a_success(ray_runs: RayRuns) -> None:
    stopping = (
        "algorithm.kl.reward_kind=k3",
        "training.early_stopping=true",
        "training.target_kl=1e-9",
    )
    run = ray_runs.train("early_stopped", *TWO_RANKS, *stopping, "training.steps=50")
    assert run.code == 0, run.err
    assert run.result["status"] == "early_stopped"
    assert run.result["steps"] < 50
