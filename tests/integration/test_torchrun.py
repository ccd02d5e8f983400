"""torchrun as the launcher: the run is that of our supervisor, and ends when a rank dies."""

from __future__ import annotations

import socket
import time

import pytest
from rank_runs import Ended, RankRuns
from resume_runs import contents
from torchrun_runs import Launcher
from workspace import LEARNING, learned

from tests.listeners import programs
from tests.timeline_checks import check_timeline

LIMIT_S = 150.0
# A run that loses a rank ends on a busy machine within this. The heartbeat would take 120 s.
LOST_S = 90.0
TWO_RANKS = ("policy.parallel.tensor=2", *LEARNING, "rollout.service=in_process")


@pytest.fixture(scope="module")
def supervised(rank_runs: RankRuns) -> Ended:
    """The same run under our own supervisor."""
    run = rank_runs.train("supervised", *TWO_RANKS)
    assert run.code == 0, run.said
    return run


@pytest.mark.everyday
def test_two_nodes_of_the_multi_node_script(launcher: Launcher, supervised: Ended) -> None:
    run = launcher.two_nodes("two-nodes", *TWO_RANKS, launcher.held("two-nodes", after=1))
    run.reach(1)
    found = programs(*(agent.pid for agent in run.agents))
    run.go_on()
    assert found["torchrun agent"] == {"127.0.0.1"}  # MASTER_ADDR
    assert found.pop("trainer rank") <= {"127.0.0.1", socket.gethostbyname(socket.gethostname())}
    assert list(found) == ["torchrun agent"]
    assert run.wait() == [0, 0], run.said
    assert "TP 2 x PP 1 x DP 1 on 2 cpu ranks" in run.logs[0].read_text()
    assert "run two-nodes" not in run.logs[1].read_text(), "rank 0 alone speaks"
    assert run.result["status"] == "completed"
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == [
        "engines.json",
        "rank_0.log",
        "rank_1.log",
    ]
    assert learned(run.rows) == learned(supervised.rows)
    assert any(row["train/grad_norm"] > 0 for row in run.rows)
    assert contents(run.folder / "hf") == contents(supervised.folder / "hf")
    assert run.processes() == []
    rows = {row["step"]: row for row in run.rows}
    groups = check_timeline(run.folder, rows, lockstep=True)
    # for what rank 1 is not late itself depends on the machine
    assert any(span.name.startswith("waits for rank 0: ") for span in groups["rank 1"])
    senders = {span.lane for span in groups["publication"]}
    assert senders == {"rank 0", "rank 1", "stages"}


def test_a_rank_that_dies_ends_the_run(launcher: Launcher) -> None:
    run = launcher.torchrun("dead-rank", *TWO_RANKS, "training.steps=100000")
    run.reach(2)
    run.rank(1).kill()
    killed = time.monotonic()
    assert run.wait() == [1], run.said
    assert time.monotonic() - killed < LOST_S
    assert "rlcore: rank 0 lost a peer in a collective" in run.said
    assert run.result["status"] == "failed"
    assert run.result["reason"].endswith("silent: rank 1")
    assert run.processes() == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            "policy.parallel.tensor=4",
            "tensor 4 x pipeline 1 x context 1 = 4 does not divide the world size 2",
        ),
        ("rollout.filters=[zero]", "rollout.filters.0 (override): 'zero' is unknown"),
    ],
    ids=["seen by every rank", "seen by rank 0"],
)
def test_bad_input_is_said_once(launcher: Launcher, wrong: str, says: str) -> None:
    run = launcher.torchrun("torchrun-bad-input", *TWO_RANKS, wrong)
    assert run.wait() == [1], "torchrun's own exit code; the rank's is 2"
    said = [line for line in run.said.splitlines() if line.startswith("rlcore: ")]
    assert len(said) == 1
    assert says in said[0]
    assert "exitcode  : 2" in run.said
    assert not run.folder.exists()
    assert run.processes() == []
