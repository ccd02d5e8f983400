"""Conversations with two engines, one failing every second step: the run is as undisturbed."""

from __future__ import annotations

import re

import pytest
from accounting_checks import check_accounting, samples_of
from engine_faults import FaultInjector
from workspace import LEARNING, Workspace

from rlcore.errors import NoEngineLeft, RunFailed
from rlcore.runs.directory import RunDirectory
from rlcore.trainer.sender_ranks import PublicationCalls, SenderRanks
from rollout.accounting.audit import audit
from rollout.collection import attempts
from rollout.engines.embedded.factory import EmbeddedServer
from rollout.service import RolloutService

STEPS = 11
PLAN = {2: (0, "SIGKILL"), 4: (1, "SIGSTOP"), 6: (0, "500"), 8: (1, "garbage"), 10: (0, "slow")}
REASONS = {
    "SIGKILL": r"killed by SIGKILL",
    "SIGSTOP": r"did not answer",
    "500": r"/generate was answered with nonsense \(HTTP 500\)",
    "garbage": r"/generate was answered with nonsense \(HTTP 200\)",
    "slow": r"made no token for 10 s \(rollout.engine.progress_timeout_s\)",
}
HERE = "rollout.service=in_process"  # where the faults are injected
TWO = (
    HERE, *LEARNING, f"training.steps={STEPS}", "rollout.engine.count=2",
    "rollout.engine.threads=1", "rollout.engine.device=cpu", "rollout.engine.progress_timeout_s=10",
    # a busy machine is no fault
    "rollout.engine.health_every_s=0.5", "rollout.engine.health_timeout_s=10",
    "rollout.engine.restart={backoff_s: 0.1, max_backoff_s: 1.0}",
)  # fmt: skip


def conversations(how: str) -> str:
    """Two turns; with "raises" the first try of every third rollout fails between them."""
    return f"rollout.workflow={{name: 'failing_environments:Faulty', how: {how}}}"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultInjector:
    faults = FaultInjector(dict(PLAN), settle=STEPS)  # type: ignore[arg-type]
    faults.install(monkeypatch, EmbeddedServer)
    return faults


def test_a_run_under_faults_is_the_run_without_them(
    workspace: Workspace, faults: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither engines that die in the middle of conversations nor rollouts that fail change it."""
    monkeypatch.setattr(attempts, "RETRY_S", 0.02)
    run = workspace.train("chaos", *TWO, conversations("raises"))
    assert run.code == 0, run.err
    assert faults.done == [fault for _, fault in PLAN.values()]
    assert run.result["status"] == "completed"
    check_accounting(run, steps=STEPS)
    assert audit(RunDirectory(run.folder)).contradictions == []
    failures = re.findall(
        r"engine (engine-\d) failed: (.*)", (run.folder / "logs" / "rank_0.log").read_text()
    )
    assert [name for name, _ in failures] == [f"engine-{number}" for number, _ in PLAN.values()]
    for (_, why), fault in zip(failures, faults.done, strict=True):
        assert re.search(REASONS[fault], why), (fault, why)
    rows = [run.rows[step] for step in range(1, STEPS + 1)]
    assert [row["episode"] for row in rows] == [16 * step for step in range(1, STEPS + 1)]
    assert sum(row["rollout/engine_restarts"] for row in rows) == len(PLAN)
    assert sum(row["rollout/retried_requests"] for row in rows) >= 3, (
        "at least those that were answered wrongly"
    )
    assert all(row["rollout/failed_tries_error"] > 0 for row in rows)
    calm = workspace.train("calm", *LEARNING, f"training.steps={STEPS}", conversations("never"))
    for step in range(1, STEPS + 1):
        assert run.rows[step]["loss/policy_avg"] == calm.rows[step]["loss/policy_avg"], step
        ours = samples_of(run, step)
        theirs = samples_of(calm, step)
        assert {s.turns for s in ours} == {2}
        assert [s.tokens.tolist() for s in ours] == [s.tokens.tolist() for s in theirs]
        assert [s.rollout_logprobs.tolist() for s in ours] == [
            s.rollout_logprobs.tolist() for s in theirs
        ]


def test_when_all_engines_die_the_run_saves_what_it_has(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = FaultInjector({4: (None, "SIGKILL")}, hit_s=0)
    faults.install(monkeypatch, EmbeddedServer)
    given = (*TWO, "training.steps=6", "rollout.engine.restart={limit: 0}")
    run = workspace.train("doomed", *given)
    assert run.code == 1
    assert run.result["status"] == "failed"
    assert run.result["steps"] == 3
    for text in (
        (
            "no engine is left, and none can be started again (rollout.engine.restart): engine"
            " engine-0: "
        ),
        "killed by SIGKILL",
        "the run is saved after step 3: continue with --resume",
    ):
        assert text in run.err
        assert text in run.result["reason"]
    monkeypatch.undo()
    again = workspace.train("doomed", *given, "--resume")
    assert again.code == 0, again.err
    check_accounting(again, steps=6)


@pytest.mark.parametrize(
    "where",
    [
        "publication",
        pytest.param("evaluation", marks=pytest.mark.full),
        "the publication before the first step",
    ],
)
def test_engines_that_end_between_the_rollouts_cost_no_step(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The current step is trained, logged and saved, though no engine takes its weights."""
    calls = []
    owner, name = (RolloutService, "evaluate") if where == "evaluation" else (SenderRanks, "order")
    original = getattr(owner, name)
    fatal = 1 if where.endswith("first step") else 3

    def fail(*given: object, **named: object) -> object:
        calls.append(name)
        # of step 2: the first is for the weights that the run starts with
        if len(calls) == fatal:
            raise NoEngineLeft("all engines burnt")
        return original(*given, **named)

    monkeypatch.setattr(owner, name, fail)
    run_name = f"burnt in the {where}"
    steps = 0 if fatal == 1 else 2
    given = (*LEARNING, "training.steps=4", "evaluation.every=1", "evaluation.max_prompts=4",
             "checkpoint.every=1", "checkpoint.async_save=true",
             workspace.heldout)  # fmt: skip
    run = workspace.train(run_name, *given)
    assert run.code == 1
    kept = (
        f"the run is saved after step {steps}: continue with --resume"
        if steps
        else "no step was trained yet"
    )
    assert f"all engines burnt; {kept}" in run.err
    assert (run.result["status"], run.result["steps"]) == ("failed", steps)
    if not steps:
        return
    assert sorted(run.rows) == [0, 1, 2]
    assert "eval/score" not in run.rows[2]
    assert run.checkpoint(2).is_dir()
    monkeypatch.undo()
    again = workspace.train(run_name, *given, "--resume")
    assert again.code == 0, again.err
    check_accounting(again, steps=4)


def fails_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int, error: Exception) -> None:
    """Rank 0's `call`-th call of `WeightPublication.name` raises `error`."""
    original = PublicationCalls.__call__
    calls = []

    def fail(made: PublicationCalls, method: str, *given: object) -> object:
        calls.extend([method] * (method == name))
        if method == name and len(calls) == call:
            raise error
        return original(made, method, *given)

    monkeypatch.setattr(PublicationCalls, "__call__", fail)


@pytest.mark.parametrize("name", [pytest.param("open", marks=pytest.mark.full), "finish"])
def test_weights_that_cannot_be_written_cost_no_step(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fails_at(monkeypatch, name, 3, RunFailed("no room for the weights"))
    run = workspace.train(f"no room to {name}", *LEARNING, "training.steps=4")
    assert run.code == 1
    assert (
        "no room for the weights; the run is saved after step 2: continue with --resume" in run.err
    )
    assert (run.result["status"], run.result["steps"]) == ("failed", 2)
    assert run.checkpoint(2).is_dir()


def test_a_run_that_is_done_does_not_need_its_engines_any_more(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at(monkeypatch, "open", 3, NoEngineLeft("all engines burnt"))
    run = workspace.train("burnt at the end", *LEARNING, "training.steps=2")
    assert run.code == 0, run.err
    assert run.lines("WARNING no engine has the weights of step 2, the last: all engines burnt")
    assert (run.result["status"], run.result["steps"]) == ("completed", 2)
    assert run.checkpoint(2).is_dir()
    assert run.exported.is_file()
    fails_at(monkeypatch, "open", 3, NoEngineLeft("all engines burnt"))
    run = workspace.train(
        "burnt before the last evaluation", *LEARNING, "training.steps=2", workspace.heldout
    )
    assert run.code == 1
    assert run.lines("all engines burnt; the run is saved after step 2")
