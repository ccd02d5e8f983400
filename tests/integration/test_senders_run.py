"""Whole runs whose two engines get their weights from a rank each."""

from __future__ import annotations

import signal

import psutil
import pytest
from rank_runs import Going, RankRuns
from resume_runs import contents
from workspace import LEARNING

from tests.process_facts import command_of
from tests.timeline_checks import check_timeline

TWO = (
    "policy.parallel.tensor=2", *LEARNING, "rollout.service=process",
    "rollout.engine.count=2", "rollout.engine.threads=1",
    "rollout.engine.restart.backoff_s=0.1", "checkpoint.export_hf=true",
    "training.steps=4",
)  # fmt: skip
ENGINE = "rollout.engines.embedded.server"
DEALT = (*TWO, "rollout.engine.senders=2")


@pytest.fixture(scope="module")
def undisturbed(rank_runs: RankRuns) -> dict[str, bytes]:
    """The weights of the run whose rank 0 sends to both engines."""
    run = rank_runs.train("one sender", *TWO)
    assert run.code == 0, run.said
    return contents(run.folder / "hf")


def test_each_rank_sends_to_one_engine_and_no_bit_changes(
    rank_runs: RankRuns, undisturbed: dict[str, bytes]
) -> None:
    run = rank_runs.train("two senders", *DEALT)
    assert run.code == 0, run.said
    assert contents(run.folder / "hf") == undisturbed
    rows = {row["step"]: row for row in run.rows}
    groups = check_timeline(run.folder, rows)
    sending = {span.lane for span in groups["publication"] if span.name == "sending bucket 0"}
    assert sending == {"rank 0", "rank 1"}
    assert run.orphans == []


def test_ranks_that_send_to_one_engine_together_change_no_bit(
    rank_runs: RankRuns, undisturbed: dict[str, bytes]
) -> None:
    """Rank 1 sends to the first engine, rank 0 helps it, and sends to the second alone."""
    run = rank_runs.train("two rails", *TWO, "rollout.engine.rails=2")
    assert run.code == 0, run.said
    assert contents(run.folder / "hf") == undisturbed
    assert all("engine" not in line for line in run.said.splitlines() if "WARNING" in line)
    assert run.orphans == []


@pytest.mark.full  # in rest: engine/test_sender_ranks.py kills one in the middle of a publication
def test_an_engine_that_dies_under_another_rank_changes_no_bit(
    rank_runs: RankRuns, undisturbed: dict[str, bytes]
) -> None:
    """The engine that was started last; it is started again and gets the weights anew."""

    def kill(going: Going) -> None:
        below = psutil.Process(going.ranks[0]).children(recursive=True)
        engines = [process for process in below if ENGINE in command_of(process)]
        assert len(engines) == 2
        max(engines, key=lambda process: process.create_time()).send_signal(signal.SIGKILL)

    run = rank_runs.train("an engine lost", *DEALT, act=kill, after_steps=1, held_after=1)
    assert run.code == 0, run.said
    assert contents(run.folder / "hf") == undisturbed
    assert sum(row.get("rollout/engine_restarts", 0) for row in run.rows) == 1
