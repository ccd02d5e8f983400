"""Conversations whose rollouts fail, while engines die in the middle and the trainer is killed."""

from __future__ import annotations

import json

import pytest
from accounting_checks import check_accounting, samples_of
from engine_faults import FaultInjector
from workspace import LEARNING, Workspace

from rlcore.runs.directory import RunDirectory
from rollout.accounting.audit import audit
from rollout.collection import attempts
from rollout.engines.embedded.client import RemoteEngine
from tests.integration.resume_runs import UPDATES, Runs, assert_same_run

STEPS = 4
TWO = (
    "rollout.service=in_process",  # where the faults are injected
    *LEARNING, f"training.steps={STEPS}", "rollout.engine.count=2", "rollout.engine.threads=1",
    "rollout.engine.device=cpu", "rollout.engine.health_every_s=0.5",
    "rollout.engine.health_timeout_s=60",  # a busy machine is no fault
    "rollout.engine.restart={backoff_s: 0.1, max_backoff_s: 1.0}",
)  # fmt: skip


def conversations(module: str, **options: object) -> str:
    return "rollout.workflow=" + json.dumps(
        {"name": f"{module}failing_environments:Faulty", **options}
    )


def test_engines_that_die_in_the_middle_of_conversations_change_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "RETRY_S", 0.02)
    calm = workspace.train("calm conversations", *TWO, conversations("", how="never"))
    assert calm.code == 0, calm.err
    faults = FaultInjector({2: (0, "SIGKILL"), 3: (1, "500")}, settle=STEPS)
    faults.install(monkeypatch, RemoteEngine)
    run = workspace.train("chaotic conversations", *TWO, conversations("", how="raises"))
    assert run.code == 0, run.err
    assert faults.done == ["SIGKILL", "500"]
    check_accounting(run, steps=STEPS)
    assert audit(RunDirectory(run.folder)).contradictions == []
    assert sum(row["rollout/engine_restarts"] for row in run.metrics) == 2
    assert all(row["rollout/failed_tries_error"] > 0 for row in run.metrics)
    for step in range(1, STEPS + 1):
        ours, theirs = samples_of(run, step), samples_of(calm, step)
        assert [s.tokens.tolist() for s in ours] == [s.tokens.tolist() for s in theirs]
        assert {s.turns for s in ours} == {2}
    assert [row["loss/policy_avg"] for row in run.metrics] == [
        row["loss/policy_avg"] for row in calm.metrics
    ]


def test_a_trainer_that_is_killed_among_failing_conversations(runs: Runs) -> None:
    """Of every five draws one fails for good, in both runs alike."""
    given = (
        "rollout.workflow="
        + json.dumps(
            {
                "name": "tests.integration.failing_environments:SomeDrawsFail",
                "how": "raises",
                "retries": 0,
            }
        ),
        "rollout.max_failed=0.9",
    )
    whole = runs.train("whole", *given)
    assert whole.codes == [0], whole.output
    for number, kill in enumerate((
        {"point": "update", "call": 2 * UPDATES + 1},
        {"point": "journal cut", "call": 1, "after": True},
    )):  # fmt: skip
        ended = runs.train("killed", *given, resume=number > 0, at=kill)
        assert ended.killed, (kill, ended.output)
    runs.finish("killed", *given)
    assert_same_run(runs.path("killed"), runs.path("whole"))
    for name in ("whole", "killed"):
        found = audit(RunDirectory(runs.path(name)))
        assert found.contradictions == []
        assert found.states["failed"] >= 3
