"""Asynchronous generation in whole runs: it learns, within the staleness bound, and saves time."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workspace import LEARNING, Run, Workspace

from benchmarks.simulation.long_tails import long_tailed
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import read_rollouts
from rlcore.runs.versions import read_versions
from rollout.accounting.audit import audit
from rollout.engines.embedded.engine import PauseGate
from rollout.fleet.dispatcher import Dispatcher
from rollout.service import RolloutService
from tests.integration.accounting_checks import PROMPTS, samples_of
from tests.integration.async_checks import (
    check_async_run,
    check_versions_of_turns,
    sample_staleness,
)
from tests.integration.resume_runs import UPDATES, Runs, result_of
from tests.timeline_checks import check_timeline

MODES = ("drain", pytest.param("retract", marks=pytest.mark.full), "in_place", "abort")
MEET_S = 60.0  # for a response and a publication to meet
CORRECTED = ("algorithm.correction={name: tis}",)
# two turns
CONVERSATIONS = "rollout.workflow={name: 'failing_environments:Faulty', how: never}"


class Meeting:
    """Has publications meet responses in flight, however fast the machine trains and generates.

    A response stays at its first token while the trainer waits for none that is asked for, until a
    publication comes; and a publication comes once that token is there.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wanted = 0.0  # the step whose responses the trainer waits for, or has had
        self.asked: list[int] = []  # the steps of the calls that are under way
        self.held = False  # a call stays where it is
        pass_through, pause = PauseGate.pass_through, PauseGate.pause
        answer = Dispatcher._answer
        next_step, evaluate = RolloutService.next_step, RolloutService.evaluate

        def passed(gate: PauseGate, ticket: int, on_retract: Any) -> None:
            self.held = on_retract.__self__.made > 0
            until(
                lambda: (
                    not self.held
                    or any(step <= self.wanted for step in [*self.asked])
                    or gate.mode is not None
                    or gate.closed
                    or gate.aborted(ticket)
                )
            )
            self.held = False
            pass_through(gate, ticket, on_retract)

        def paused(gate: PauseGate, mode: Any) -> None:
            until(lambda: gate.closed or not gate._open_tickets or self.held)
            pause(gate, mode)

        async def answered(dispatcher: Dispatcher, requests: Any, *given: Any, **named: Any) -> Any:
            step = min(request.draw for request in requests) // PROMPTS + 1
            self.asked.append(step)
            try:
                return await answer(dispatcher, requests, *given, **named)
            finally:
                self.asked.remove(step)

        def stepped(service: RolloutService, step: int) -> Any:
            self.wanted = step
            return next_step(service, step)

        def evaluated(service: RolloutService, *given: Any) -> Any:
            before, self.wanted = self.wanted, math.inf
            try:
                return evaluate(service, *given)
            finally:
                self.wanted = before

        patch.setattr(PauseGate, "pass_through", passed)
        patch.setattr(PauseGate, "pause", paused)
        patch.setattr(Dispatcher, "_answer", answered)
        patch.setattr(RolloutService, "next_step", stepped)
        patch.setattr(RolloutService, "evaluate", evaluated)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MEET_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation takes longer than training, so that publications meet responses in flight."""
    Meeting(monkeypatch)


# --- it learns ------------------------------------------------------------------------------------


@pytest.mark.everyday
@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_ahead_of_its_trainer_learns(workspace: Workspace, staleness: int) -> None:
    run = workspace.train(
        f"async {staleness}", *LEARNING, *CORRECTED, "training.steps=32",
        f"rollout.max_staleness={staleness}", "rollout.on_update=in_place",
        "rollout.samples_per_prompt=8",
    )  # fmt: skip
    assert run.code == 0, run.err
    seen = check_async_run(run.folder, steps=32, staleness=staleness)
    assert max(seen) == staleness
    rewards = [row["rollout/reward"] for row in run.metrics]
    assert statistics.fmean(rewards[-8:]) > statistics.fmean(rewards[:8]) + 0.8
    for step in range(1, 33):
        row = run.rows[step]
        parts = [age for parts in sample_staleness(run.folder, step) for age in parts]
        assert row["rollout/staleness_max"] == max(parts), "counted in policy steps"
        assert min(parts) <= row["rollout/staleness_mean"] <= max(parts)
        assert 0.0 <= row["perf/engine_idle_fraction"] <= 1.0
        assert 0.0 <= row["perf/trainer_idle_fraction"] <= 1.0
        assert row["rollout/buffered_groups"] <= 4 * staleness
    assert (
        run.rows[32]["rollout/buffered_groups"] == run.rows[32]["rollout/in_flight_groups"] == 0.0
    ), "none was made in vain"
    states = audit(RunDirectory(run.folder)).states
    assert states["consumed"] == sum(states.values()) == 32 * 4
    groups = check_timeline(run.folder, run.rows)
    training = [span for span in groups["rank 0"] if span.name == "training"]
    assert any(
        request.begin < phase.end and request.end > phase.begin
        for request in groups["engine engine-0"]
        if request.name == "request"
        for phase in training
    ), "engines work while the trainer trains"


def test_a_step_trained_on_older_tokens_is_replayed_to_the_bit(workspace: Workspace) -> None:
    every = (
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "algorithm.correction={name: tis, max_staleness: 0}",
    )
    run = workspace.train(
        "async, recorded", *LEARNING, *every, "training.steps=5", "rollout.max_staleness=2"
    )
    assert run.code == 0, run.err
    # which step it is depends on who is quicker
    step = next(s for s in (4, 3, 5, 2) if run.rows[s]["rollout/staleness_max"] > 0)
    row = run.rows[step]
    assert row["correction/stale_fraction"] > 0, (
        "the bound of the correction counts policy steps too"
    )
    again = workspace.replay(run, step)
    assert again.code == 0, again.err
    for name in ("loss/policy_avg", "train/grad_norm", "rollout/staleness_mean",
                 "rollout/staleness_max", "correction/stale_fraction"):  # fmt: skip
        assert again.rows[1][name] == row[name], name


# --- publications that meet responses in flight ---------------------------------------------------


@pytest.mark.usefixtures("slow_tokens")
@pytest.mark.parametrize("mode", MODES)
def test_what_a_publication_does_to_responses_in_flight(workspace: Workspace, mode: str) -> None:
    run = workspace.train(
        f"async {mode}", *LEARNING, *CORRECTED, "training.steps=6", "rollout.max_staleness=1",
        f"rollout.on_update={mode}",
    )  # fmt: skip
    assert run.code == 0, run.err
    check_async_run(run.folder, steps=6, staleness=1)
    crossed = [
        parts
        for step in range(1, 7)
        for parts in sample_staleness(run.folder, step)
        if len(parts) > 1
    ]
    if mode == "drain":
        assert crossed == []
    else:
        assert crossed, "some responses were begun by one version and ended by another"
        assert all(parts == sorted(parts, reverse=True) for parts in crossed)
    resumed = sum(row["rollout/resumed_responses"] for row in run.metrics)
    assert (resumed > 0) == (mode == "abort")
    assert all(row["rollout/requeued_prompts"] == 0 for row in run.metrics)


@pytest.mark.usefixtures("slow_tokens")
def test_a_publication_in_the_middle_of_a_turn(workspace: Workspace) -> None:
    """Each token is of the version that made it, and has the log-prob of that version's weights."""
    run = workspace.train(
        "async conversations", *LEARNING, *CORRECTED, CONVERSATIONS, "training.steps=5",
        "rollout.max_staleness=1", "rollout.on_update=abort", "checkpoint.every=1",
        "checkpoint.keep=9",
    )  # fmt: skip
    assert run.code == 0, run.err
    check_async_run(run.folder, steps=5, staleness=1)
    samples = [sample for step in range(1, 6) for sample in samples_of(run, step)]
    check_versions_of_turns(workspace, run, samples)


# --- filters, evaluation --------------------------------------------------------------------------


def test_filters_refill_and_over_sampling_loses_nothing(workspace: Workspace) -> None:
    digits = "reward.parts={digits: {function: 'tests.integration.resume_rewards:share_of_digits'}}"
    run = workspace.train(
        "async, filtered", *LEARNING, *CORRECTED, digits, "reward.workers=1",
        "rollout.filters=[zero_variance]", "rollout.oversample=1.5", "rollout.max_staleness=2",
        "training.steps=8",
    )  # fmt: skip
    assert run.code == 0, run.err
    check_async_run(run.folder, steps=8, staleness=2)
    states = audit(RunDirectory(run.folder)).states
    assert states["consumed"] == 32
    assert all(row["rollout/zero_std_groups"] == 0 for row in run.metrics)
    dropped = sum(row["rollout/dropped_zero_variance"] for row in run.metrics)
    assert dropped <= states.get("dropped by zero_variance", 0)


@pytest.mark.usefixtures("slow_tokens")
def test_an_evaluation_beside_uses_the_newest_weights(workspace: Workspace, tmp_path: Path) -> None:
    given = (workspace.heldout, "evaluation.max_prompts=8", "evaluation.temperature=1.0",
             "evaluation.every=2", "checkpoint.every=2", "checkpoint.keep=9")  # fmt: skip
    run = workspace.train(
        "async, evaluated", *LEARNING, *given, "rollout.max_staleness=1", "training.steps=3"
    )
    assert run.code == 0, run.err
    output = ("--output", str(tmp_path / "scores.json"))
    scored = workspace.command(
        "eval", str(run.folder / "config.yaml"), "--model", str(run.checkpoint(2)), *output
    )
    assert scored.code == 0, scored.err
    assert (
        json.loads((tmp_path / "scores.json").read_text())["eval/score"]
        == run.rows[2]["eval/score"]
    )
    assert len({run.rows[step]["eval/score"] for step in (0, 2)}) == 2, (
        "weights that tell one step from another"
    )


# --- the end, and after ---------------------------------------------------------------------------


AHEAD = ("rollout.max_staleness=2", "rollout.on_update=retract", "training.steps=8")


@pytest.mark.parametrize("workflow", ["single_turn", "conversations"])
def test_an_early_stop_leaves_books_that_balance(workspace: Workspace, workflow: str) -> None:
    armed = (
        "training.early_stopping=true",
        "training.target_kl=1e-9",
        "algorithm.kl.reward_kind=k3",
        "training.steps=8",
        *([CONVERSATIONS] if workflow == "conversations" else []),
    )
    run = workspace.train(f"stopped, {workflow}", *LEARNING, *armed, "rollout.max_staleness=2")
    assert run.code == 0, run.err
    assert (run.result["status"], run.result["steps"]) == ("early_stopped", 2)
    check_async_run(run.folder, steps=2, staleness=2)
    states = audit(RunDirectory(run.folder)).states
    assert states["consumed"] == 8
    assert states["in flight"] == 0
    assert states["finished"] + states["requeued"] > 0, (
        "what was made in advance is there, or is drawn again"
    )


def test_asked_to_end_while_groups_are_made_it_saves_and_goes_on(runs: Runs) -> None:
    at: dict[str, Any] = {"point": "update", "call": 2 * UPDATES + 1, "action": "terminate"}
    ended = runs.train("asked", *AHEAD, at=at)
    assert ended.codes == [130], ended.output
    assert ended.orphans == []
    assert (result_of(runs.path("asked"))["status"], result_of(runs.path("asked"))["steps"]) == (
        "interrupted",
        3,
    )
    check_async_run(runs.path("asked"), steps=3, staleness=2)
    runs.finish("asked", *AHEAD)
    assert max(check_async_run(runs.path("asked"), steps=8, staleness=2)) > 0


@pytest.mark.full
def test_versions_grow_on_where_their_journal_was_lost(runs: Runs) -> None:
    """The checkpoint of step 3 has groups that were made by earlier ones."""
    ended = runs.train(
        "lost", *AHEAD, at={"point": "update", "call": 2 * UPDATES + 1, "action": "terminate"}
    )
    assert ended.codes == [130], ended.output
    journal = RunDirectory(runs.path("lost")).versions_path
    newest = read_versions(journal)[-1]
    assert newest.step == 3
    journal.unlink()
    runs.finish("lost", *AHEAD)
    assert result_of(runs.path("lost"))["steps"] == 8
    assert read_versions(journal)[0].version == newest.version + 1


@pytest.mark.parametrize("at", [
    {"point": "publish", "call": 6},
    pytest.param({"point": "rollouts", "call": 4, "after": True}, marks=pytest.mark.full),
    pytest.param({"point": "commit", "call": 1, "after": True}, marks=pytest.mark.full),
], ids=lambda at: at["point"].replace(" ", "_"))  # fmt: skip
def test_killed_while_groups_are_made_it_goes_on(runs: Runs, at: dict[str, Any]) -> None:
    name = f"killed at {at['point']}"
    ended = runs.train(name, *AHEAD, at=at)
    assert ended.killed, ended.output
    runs.finish(name, *AHEAD)
    check_async_run(runs.path(name), steps=8, staleness=2)


# --- long tails ----------------------------------------------------------------------------------


def one_in_eight(draw: int) -> float:
    """Takes ten times as long as the others."""
    return 0.5 if random.Random(draw).random() < 0.125 else 0.05


def slow_run(workspace: Workspace, staleness: int) -> Run:
    return workspace.train(
        f"long-tailed {staleness}", *LEARNING, *CORRECTED, "training.steps=16",
        f"rollout.max_staleness={staleness}", "rollout.on_update=in_place",
        "checkpoint.export_hf=false",
    )  # fmt: skip


def test_with_long_tails_long_answers_are_trained_on_as_short_ones_are(
    workspace: Workspace,
) -> None:
    """What running ahead is worth in time: benchmarks/asynchrony.py."""
    with long_tailed(one_in_eight):
        lock_step = slow_run(workspace, 0)
        asynchronous = slow_run(workspace, 2)
    for run, staleness in ((lock_step, 0), (asynchronous, 2)):
        assert run.code == 0, run.err
        check_async_run(run.folder, steps=16, staleness=staleness)
    draws = [
        sorted({r["draw"] for s in range(1, 17) for r in read_rollouts(run.rollouts(s))})
        for run in (lock_step, asynchronous)
    ]
    assert draws[0] == draws[1] == list(range(64))
