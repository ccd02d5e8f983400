"""Runs listen where somebody of theirs has to reach them, and nowhere else."""

from __future__ import annotations

import os
import signal

from rank_runs import Going, RankRuns

from tests.listeners import programs

FOREVER = ("training.steps=100000", "policy.parallel.tensor=2")


def test_a_run_on_one_machine_listens_on_loopback_alone(rank_runs: RankRuns) -> None:
    found: dict[str, set[str]] = {}

    def look(going: Going) -> None:
        found.update(programs(going.supervisor, *going.ranks))
        os.kill(going.supervisor, signal.SIGTERM)

    run = rank_runs.train("listens", *FOREVER, "rollout.service=process", act=look)
    assert run.result["status"] == "interrupted", run.said
    assert found == {key: {"127.0.0.1"} for key in ("trainer rank", "embedded engine")}
    assert run.orphans == []
