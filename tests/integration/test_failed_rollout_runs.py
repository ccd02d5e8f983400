"""Runs whose rollouts fail in every way: they complete, and what was tried again is bit-equal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import failing_environments
import pytest
from accounting_checks import accounting_faults
from workspace import LEARNING, ROOT, Run, Workspace

from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import read_rollouts
from rollout.accounting.audit import audit
from rollout.collection import attempts

STEPS = 2
SHORT = (*LEARNING, f"training.steps={STEPS}", "checkpoint.every=1")
OUTCOME = ("reward={parts: {env: {source: workflow}}}",)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attempts, "RETRY_S", 0.02)
    failing_environments.resets.clear()
    failing_environments.began.clear()
    failing_environments.over.clear()
    yield
    failing_environments.over.set()  # threads that hang


def workflow(name: str, **options: Any) -> str:
    given = {"name": f"failing_environments:{name}", **options}
    return f"rollout.workflow={json.dumps(given)}"


def environment(how: str, name: str = "Environment", **options: Any) -> str:
    given = {"env": f"failing_environments:{name}", "options": {"how": how}, **options}
    return f"rollout.workflow={json.dumps({'name': 'env', **given})}"


def check(run: Run, *, steps: int = STEPS, max_staleness: int = 0) -> None:
    """Assert that the run is complete and its ledger balances."""
    assert run.code == 0, run.err
    assert accounting_faults(run.folder, steps=steps, max_staleness=max_staleness) == []
    assert audit(RunDirectory(run.folder)).contradictions == []


def failed(run: Run, name: str = "rollout/failed_tries") -> float:
    return sum(row.get(name, 0.0) for row in run.metrics)


# --- tried again: as if nothing had happened ------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(workspace: Workspace) -> bytes:
    run = workspace.train("undisturbed", *SHORT, workflow("Faulty", how="never"))
    check(run)
    assert failed(run) == 0.0
    return run.exported.read_bytes()


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("raises", "error"),
        pytest.param("hangs", "timeout", marks=pytest.mark.full),
        ("hangs in a thread", "timeout"),
        ("exits", "exit"),
        ("nonsense", "result"),
    ],
)
def test_a_retry_in_the_middle_of_a_conversation_changes_no_bit(
    workspace: Workspace, undisturbed: bytes, how: str, kind: str
) -> None:
    limit_s = 1.0 if how.startswith("hangs") else 60.0  # a busy machine is no hang
    faulty = workflow("Faulty", how=how, timeout_s=limit_s, retries=8)
    run = workspace.train(f"again {how}", *SHORT, faulty)
    check(run)
    assert failed(run) == failed(run, f"rollout/failed_tries_{kind}") > 5
    assert failed(run, "rollout/failed_groups") == 0.0
    assert run.exported.read_bytes() == undisturbed


@pytest.fixture(scope="module")
def calm(workspace: Workspace) -> bytes:
    run = workspace.train("calm environment", *SHORT, *OUTCOME, environment("never"))
    check(run)
    return run.exported.read_bytes()


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("raises", "error"),
        ("hangs", "timeout"),
        ("exits", "exit"),
        ("nan", "result"),
        pytest.param("no number", "result", marks=pytest.mark.full),
        pytest.param("down", "error", marks=pytest.mark.full),
        ("hangs at its end", ""),
    ],
)
def test_an_environment_that_fails_at_times(
    workspace: Workspace, calm: bytes, how: str, kind: str
) -> None:
    limit_s = 0.5 if how.startswith("hangs") else 60.0  # a busy machine is no hang
    run = workspace.train(
        f"at times {how}", *SHORT, *OUTCOME, environment(how, retries=8, tool_timeout_s=limit_s)
    )
    check(run)
    assert failed(run) == failed(run, f"rollout/failed_tries_{kind}") or not kind
    assert failed(run) > 0 or not kind
    assert run.exported.read_bytes() == calm


# --- given up: another takes its place ------------------------------------------------------------


@pytest.mark.everyday
def test_a_group_that_is_given_up_is_drawn_anew_and_a_resumed_run_agrees(
    workspace: Workspace,
) -> None:
    """Of five draws one fails, in lock-step: which ones is the same in a resumed run."""
    given = (*SHORT, workflow("SomeDrawsFail", how="raises", retries=0), "rollout.max_failed=0.5")
    whole = workspace.train("some fail", *given)
    check(whole)
    assert failed(whole, "rollout/failed_groups") == 2
    assert failed(whole) >= 2
    found = audit(RunDirectory(whole.folder))
    assert (found.states["consumed"], found.states["failed"]) == (8, 2)
    assert found.failed == {"error": 2}
    for step in (1, 2):
        samples = read_rollouts(whole.rollouts(step))
        assert len(samples) == 16, "part of a group never trains"
        assert not {1, 6} & {sample["draw"] for sample in samples}
    workspace.train("some fail again", *given, "training.steps=1")
    again = workspace.train("some fail again", *given, "--resume")
    check(again)
    assert again.exported.read_bytes() == whole.exported.read_bytes()
    said = workspace.command("ledger", str(whole.folder))
    assert said.lines("failed           2 error")
    assert said.lines("balanced")
    life = workspace.command("ledger", str(whole.folder), "--draw", "1")
    assert life.lines("draw 1: failed")
    assert life.lines("failed (kind error)")


def test_groups_fail_while_others_are_made_ahead(workspace: Workspace) -> None:
    run = workspace.train(
        "ahead", *SHORT, "rollout.max_staleness=1", "rollout.max_failed=0.9",
        workflow("SomeDrawsFail", how="exits", retries=0),
    )  # fmt: skip
    check(run, max_staleness=1)
    assert audit(RunDirectory(run.folder)).states["failed"] >= 2


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_run_in_which_everything_fails_ends_with_the_commonest_failure(
    workspace: Workspace, staleness: int
) -> None:
    run = workspace.train(
        f"all fail {staleness}", *SHORT, *OUTCOME, environment("", name="Broken"),
        f"rollout.max_staleness={staleness}",
    )  # fmt: skip
    assert run.code == 1
    (line,) = run.lines("rlcore: ")
    assert re.search(
        r"step 1: (\d) of \1 groups failed, which is more than rollout\.max_failed", line
    )
    assert re.search(r"the commonest failure, \d times: workflow env failed on", line)
    assert "KeyError: 'door'" in line
    assert "failing_environments.py:" in line
    assert "in raises)" in line
    assert audit(RunDirectory(run.folder)).contradictions == []


# --- evaluation -----------------------------------------------------------------------------------


def heldout(workspace: Workspace) -> str:
    path = workspace.folder / "data" / "heldout.jsonl"
    return f"evaluation={json.dumps({'paths': [str(path)], 'max_prompts': 10, 'k': [1]})}"


def test_in_an_evaluation_what_fails_is_wrong_and_counted(workspace: Workspace) -> None:
    on_error = "reward={on_error: -2.0, parts: {env: {source: workflow}}}"
    run = workspace.train(
        "evaluated", *SHORT, "training.steps=1", heldout(workspace), on_error,
        environment("raises", retries=0), "rollout.max_failed=1.0",
    )  # fmt: skip
    assert run.code == 0, run.err
    row = run.rows[0]
    assert row["eval/failed"] == 2
    assert row["eval/score"] < (8 * 7 - 2 * 2) / 10
    assert row["eval/stop_token_rate"] <= 0.8


def test_an_evaluation_of_which_all_fails_ends_the_run(workspace: Workspace) -> None:
    run = workspace.train(
        "all wrong", *SHORT, heldout(workspace), *OUTCOME, environment("", name="Broken")
    )
    assert run.code == 1
    assert run.lines("all 10 rollouts of the evaluation failed; the commonest failure, 10 times")


# --- the end of the process -----------------------------------------------------------------------


def test_children_and_threads_that_are_left_behind_do_not_keep_the_process(
    workspace: Workspace,
) -> None:
    """Python itself would wait for the children without limit."""
    program = (
        "import rlcore.launch.signals as signals; signals.EXIT_S = 2.0;"
        "import sys; from rlcore.cli import main; sys.exit(main())"
    )
    given = [
        "train", str(workspace.base), "run.name=leaks", *SHORT, "training.steps=1", *OUTCOME,
        environment("leaks"),
    ]  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", program, *given],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
    )
    assert ended.returncode == 0, ended.stderr
    assert "rlcore: ended by force, since something was left behind: process" in ended.stderr
    folder = workspace.folder / "runs" / "leaks"
    assert json.loads((folder / "result.json").read_bytes())["status"] == "completed"
