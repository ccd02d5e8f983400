"""A worker that dies or hangs ends the run in time, with its rank and log, and no orphan."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from rank_runs import Act, Ended, Going, RankRuns, to_child, to_rank
from workspace import Workspace

FOREVER = ("training.steps=100000", "policy.parallel.tensor=2")
IN_PROCESS = ("rollout.service=in_process",)  # no engine process to start: quicker
SERVER = ("rollout.service=process",)
HEARTBEAT_S = 8  # a rank that runs is not silent for so long, on a busy machine either
REQUEST_S = 10
COLLECTIVE_S = 10
SOON_S = 40.0  # less than a launcher gives to ranks that do not leave


def assert_failed(run: Ended, *says: str, within_s: float, reason: str = "") -> None:
    """Assert exit code 1 in time, `says` on the terminal, `reason` in result.json, no orphan."""
    assert run.code == 1, run.said
    for text in says:
        assert text in run.said
    assert run.result["status"] == "failed"
    assert (reason or says[0]) in run.result["reason"]
    assert run.result["steps"] == len(run.rows) >= 2
    assert run.seconds < within_s
    assert run.orphans == []


def last_lines(run: Ended, rank: int) -> list[str]:
    """Return the lines that the terminal shows of a rank's log, up to the end of the report."""
    head = f"the last lines of {run.folder / 'logs' / f'rank_{rank}.log'}:"
    assert head in run.said, run.said
    return [line.strip() for line in run.said.partition(head)[2].strip().splitlines()]


# --- trainer processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_that_is_killed(rank_runs: RankRuns, rank: int) -> None:
    run = rank_runs.train(
        f"killed-{rank}", *FOREVER, *IN_PROCESS, act=to_rank(rank, signal.SIGKILL)
    )
    killed = f"rank {rank} failed: it was killed by SIGKILL"
    assert_failed(run, killed, within_s=SOON_S)
    (line,) = run.lines(killed)
    assert "with --resume; " in line or "with --overwrite; " in line, "how it goes on"
    assert "INFO rlcore.trainer.loop: step " in last_lines(run, rank)[-1]
    assert len(run.lines("rlcore: ")) == 1, "said once"
    assert "Traceback" not in run.said
    assert f"rank {rank} failed: it was killed by SIGKILL" in run.log(1 - rank), (
        "the other rank's log says why it left"
    )


def test_a_rank_that_is_stopped(rank_runs: RankRuns) -> None:
    run = rank_runs.train(
        "silent rank", *FOREVER, *IN_PROCESS, f"cluster.heartbeat_timeout_s={HEARTBEAT_S}",
        act=to_rank(1, signal.SIGSTOP),
    )  # fmt: skip
    silent = (
        f"rank 1 failed: it has been silent for {HEARTBEAT_S} s (cluster.heartbeat_timeout_s:"
        f" {HEARTBEAT_S})"
    )
    assert_failed(run, f"{silent}; it was at: ", within_s=HEARTBEAT_S + SOON_S)
    assert "INFO rlcore.trainer.loop: step " in last_lines(run, 1)[-1]
    assert "Traceback" not in run.said


def test_an_exception_on_one_rank(rank_runs: RankRuns) -> None:
    run = rank_runs.train(
        "raises", *FOREVER, *IN_PROCESS, "algorithm.loss={name: 'failing_plugins:Rank1Raises'}"
    )
    assert_failed(
        run,
        "rank 1 failed: ArithmeticError: only rank 1 sees this (",
        "failing_plugins.py",
        within_s=SOON_S,
    )
    shown = last_lines(run, 1)
    assert shown[-1] == "ArithmeticError: only rank 1 sees this", "the end of the log is the error"
    assert any("in fail" in line for line in shown), "with its traceback"
    assert "Traceback" not in run.log(0).replace("this rank ends", ""), (
        "rank 0 knows that the fault is not its own"
    )


@pytest.mark.full
def test_a_rank_that_others_wait_for_shows_where_it_is(rank_runs: RankRuns) -> None:
    """Its heartbeat goes on: the deadline of the collective ends the wait."""
    run = rank_runs.train(
        "hangs", *FOREVER, *IN_PROCESS, "algorithm.loss={name: 'failing_plugins:Rank1Hangs'}",
        f"cluster.collective_timeout_s={COLLECTIVE_S}",
    )  # fmt: skip
    waited = (
        "rank 0 waited for its peers in a collective for longer than cluster.collective_timeout_s"
    )
    assert_failed(run, waited, within_s=COLLECTIVE_S + SOON_S)
    assert "trainer rank 1 failed: it did not reach the point where the others waited" in run.said
    assert any("failing_plugins.py" in line and "in fail" in line for line in last_lines(run, 1))


@pytest.mark.full
def test_a_plugin_that_raises_on_rank_0(rank_runs: RankRuns) -> None:
    run = rank_runs.train(
        "estimator",
        *FOREVER,
        *IN_PROCESS,
        "algorithm.estimator={name: 'failing_plugins:RaisesInStep2'}",
    )
    assert run.code == 1
    assert run.result["status"] == "failed"
    assert run.result["steps"] == 1
    assert run.result["reason"].startswith("ZeroDivisionError: no samples of this kind (")
    assert run.said.rstrip().endswith("ZeroDivisionError: no samples of this kind"), (
        "a plugin's bug comes with its traceback"
    )
    assert run.log(0).rstrip().endswith("ZeroDivisionError: no samples of this kind")
    assert "rank 0 failed: ZeroDivisionError: no samples of this kind" in run.log(1)
    assert run.orphans == []


# --- processes below rank 0 -----------------------------------------------------------------------


@pytest.mark.full  # test_chaos.py kills all of them
def test_without_an_engine_the_run_saves_and_ends(rank_runs: RankRuns) -> None:
    """Whether a request, a publication or the question for its health comes first is chance."""
    run = rank_runs.train(
        "engine-stopped", *FOREVER, *SERVER, "rollout.engine.restart.limit=0",
        f"rollout.engine.request_timeout_s={REQUEST_S}",
        f"rollout.engine.update_timeout_s={REQUEST_S}",
        act=to_child("rollout.engines.embedded.server", signal.SIGSTOP),
    )  # fmt: skip
    assert_failed(run, "did not answer", "engine engine-0", within_s=SOON_S)
    assert "Traceback" not in run.said
    steps = run.result["steps"]
    assert steps == run.rows[-1]["step"] >= 2
    assert f"the run is saved after step {steps}: continue with --resume" in run.said
    assert [folder.name for folder in sorted((run.folder / "checkpoints").iterdir())] == [
        f"step_{steps:06d}"
    ]

    again = rank_runs.train("engine-stopped", f"training.steps={steps + 2}", "--resume")
    assert again.code == 0, again.said
    assert [row["step"] for row in again.rows] == list(range(1, steps + 3))


# --- the supervisor -------------------------------------------------------------------------------


def to_supervisor(number: signal.Signals, *, after_s: float = 0.0) -> Act:
    def act(going: Going) -> None:
        time.sleep(after_s)
        os.kill(going.supervisor, number)

    return act


def test_nothing_outlives_a_supervisor_that_is_killed(rank_runs: RankRuns) -> None:
    """Not even ranks that are stuck: one in its plugin, the other in a collective."""
    hanging = "algorithm.loss={name: 'failing_plugins:Rank1Hangs'}"
    run = rank_runs.train(
        "orphaned", *FOREVER, *IN_PROCESS, hanging, act=to_supervisor(signal.SIGKILL, after_s=1)
    )
    assert run.code == -signal.SIGKILL
    assert "Traceback" not in run.said
    assert run.orphans == []


def test_an_interrupt_of_the_supervisor_ends_the_run_in_peace(rank_runs: RankRuns) -> None:
    run = rank_runs.train("interrupted", *FOREVER, *IN_PROCESS, act=to_supervisor(signal.SIGINT))
    assert run.code == 130, run.said
    assert run.result["status"] == "interrupted"
    assert (run.folder / "checkpoints" / f"step_{run.result['steps']:06d}").is_dir()
    assert run.orphans == []


# --- bad input with several ranks -----------------------------------------------------------------


def bad_row(folder: Path) -> str:
    path = folder / "bad_row.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": 1}\n')
    return f"data.paths={path}"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("seen by rank 0", "bad_row.jsonl:2"),
        (
            "seen by every rank",
            "policy.megatron.num_layrs: megatron.core's TransformerConfig has no such field",
        ),
        ("seen while the run goes", "drops_all dropped"),
    ],
)
def test_bad_input_is_said_once(
    rank_runs: RankRuns, workspace: Workspace, tmp_path: Path, kind: str, says: str
) -> None:
    wrong = {
        "seen by rank 0": bad_row(tmp_path),
        "seen by every rank": "policy.megatron.num_layrs=2",
        "seen while the run goes": "rollout.filters=['failing_plugins:drops_all']",
    }[kind]
    run = rank_runs.train(
        "bad-input", "policy.parallel.tensor=2", *IN_PROCESS, wrong, "--overwrite"
    )
    assert run.code == 2, run.said
    assert [says in line for line in run.lines("rlcore: ")] == [True]
    assert "Traceback" not in run.said
    assert run.orphans == []
    assert run.folder.exists() == (kind == "seen while the run goes")
