"""Runs listen where somebody of theirs has to reach them, and nowhere else."""

from __future__ import annotations

import os
import signal

import pytest
from rank_runs import Going, RankRuns

from tests.listeners import programs

FOREVER = ("training.steps=100000", "policy.parallel.tensor=2")


@pytest.mark.parametrize("in_process", [True, False])
def test_a_run_on_one_machine_listens_on_loopback_alone(
    rank_runs: RankRuns, in_process: bool
) -> None:
    found: dict[str, set[str]] = {}

    def look(going: Going) -> None:
        found.update(programs(going.supervisor, *going.ranks))
        os.kill(going.supervisor, signal.SIGTERM)

    run = rank_runs.train(
        f"listens {in_process}", *FOREVER, f"rollout.engine.in_process={in_process}", act=look
    )
    assert run.result["status"] == "interrupted", run.said
    expected = ["trainer rank", *([] if in_process else ["embedded engine"])]
    assert found == {key: {"127.0.0.1"} for key in expected}
    assert run.orphans == []
