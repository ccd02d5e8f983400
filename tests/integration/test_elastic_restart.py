"""torchrun restarts failed ranks (`--max-restarts`): the run continues as if undisturbed."""

from __future__ import annotations

import pytest
from accounting_checks import accounting_faults
from rank_runs import Ended, RankRuns
from torchrun_runs import Launched, Launcher
from workspace import LEARNING, learned

from tests.integration.resume_runs import contents

STEPS = 12
SETTINGS = (
    "policy.parallel.tensor=2", *LEARNING, "rollout.service=in_process",
    f"training.steps={STEPS}", "checkpoint.every=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(rank_runs: RankRuns) -> Ended:
    run = rank_runs.train("never-restarted", *SETTINGS)
    assert run.code == 0, run.said
    return run


def assert_ended_as(run: Launched, other: Ended) -> None:
    """The same metrics but for times, each step once, and the same weights, bit for bit."""
    assert run.result["status"] == "completed"
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    assert learned(run.rows) == learned(other.rows)
    assert contents(run.folder / "hf") == contents(other.folder / "hf")
    assert run.processes() == []


@pytest.mark.full  # as test_soak.py
def test_a_killed_rank_is_started_again_and_the_run_ends_as_undisturbed(
    launcher: Launcher, undisturbed: Ended
) -> None:
    until = launcher.held("rank-comes-back", after=7)
    run = launcher.two_nodes("rank-comes-back", *SETTINGS, until, restarts=1)
    run.reach(5)
    run.rank(1).kill()
    run.go_on()
    assert run.wait() == [0, 0], run.said
    assert "rank 0 lost a peer in a collective" in run.said
    assert_ended_as(run, undisturbed)


@pytest.mark.full
def test_a_lost_node_that_comes_back_joins_the_next_attempt(
    launcher: Launcher, undisturbed: Ended
) -> None:
    """Its new agent counts restarts from 0, the other node's goes on counting."""
    until = launcher.held("node-comes-back", after=6)
    run = launcher.two_nodes("node-comes-back", *SETTINGS, until, restarts=2)
    run.reach(4)
    run.lose(1)
    run.go_on()
    run.bring_back(1)
    assert run.wait() == [0, 0], run.said
    assert_ended_as(run, undisturbed)


@pytest.mark.full
def test_a_first_start_on_an_existing_run_stays_refused_however_often_it_is_tried(
    launcher: Launcher, undisturbed: Ended
) -> None:
    before = (undisturbed.folder / "metrics.jsonl").read_bytes()
    run = launcher.two_nodes(
        "never-restarted", *SETTINGS, f"training.steps={STEPS + 1}", restarts=1
    )
    assert run.wait() == [1, 1], run.said
    assert run.said.count("run 'never-restarted' exists") == 4, "each node, each time"
    assert (undisturbed.folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.full
def test_a_run_ahead_of_its_trainer_loses_nothing_when_it_is_started_again(
    launcher: Launcher,
) -> None:
    asynchronous = (
        "rollout.max_staleness=2",
        "rollout.on_update=retract",
        "algorithm.correction={name: tis}",
    )
    until = launcher.held("async-comes-back", after=7)
    run = launcher.two_nodes("async-comes-back", *SETTINGS, until, *asynchronous, restarts=1)
    run.reach(5)
    run.rank(1).kill()
    run.go_on()
    assert run.wait() == [0, 0], run.said
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    assert accounting_faults(run.folder, steps=STEPS, max_staleness=2) == []
    assert run.processes() == []


@pytest.mark.full
def test_overwriting_is_done_once(
    launcher: Launcher, undisturbed: Ended, rank_runs: RankRuns
) -> None:
    assert rank_runs.train("overwritten", *SETTINGS, "training.steps=1").code == 0
    # rank 1 may wait for a word of rank 0 when that dies, in no collective
    noticed = "cluster.heartbeat_timeout_s=20"
    until = launcher.held("overwritten", after=7)
    run = launcher.two_nodes("overwritten", *SETTINGS, until, "--overwrite", noticed, restarts=1)
    run.reach(5)
    run.rank(0).kill()
    run.go_on()
    assert run.wait() == [0, 0], run.said
    assert_ended_as(run, undisturbed)
