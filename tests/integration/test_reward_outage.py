"""A reward service that dies in the middle of a run: nothing is learnt from it, nothing is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from accounting_checks import accounting_faults, samples_of
from json_server import answering
from workspace import LEARNING, Run, Workspace

from rlcore.runs.directory import RunDirectory
from rollout.accounting.audit import audit

STEP = 16  # samples of a step


class RewardServer:
    """Scores responses by their length in slime's format, until it is told to answer 503."""

    def __init__(self) -> None:
        self.url = ""
        self.up = 0  # answers that are left; then it is down
        self.mends_after = 0  # refusals after which it is up again; 0: never
        self.refused = 0
        self.lock = threading.Lock()

    def answer(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
        return (200, float(len(body["response"]))) if self.answers() else (503, "down for repairs")

    def answers(self) -> bool:
        with self.lock:
            if self.up > 0:
                self.up -= 1
                return True
            self.refused += 1
            if self.refused == self.mends_after:
                self.up = 1_000_000
            return False


@pytest.fixture
def server() -> Iterator[RewardServer]:
    made = RewardServer()
    with answering(made.answer) as made.url:
        yield made


def train(workspace: Workspace, server: RewardServer, name: str, *arguments: str) -> Run:
    service = {"url": f"{server.url}/score", "retries": 0}
    return workspace.train(
        name, *LEARNING, "training.steps=4", "checkpoint.every=10", "algorithm.kl.reward_coef=0",
        f"reward={json.dumps({'parts': {'rm': {'service': service}}})}", *arguments,
    )  # fmt: skip


def largest_move(one: Run, other: Run) -> float:
    before = one.weights
    return max(float((tensor - before[name]).abs().max()) for name, tensor in other.weights.items())


def check(run: Run) -> None:
    assert run.code == 0, run.err
    assert accounting_faults(run.folder, steps=4) == []
    assert audit(RunDirectory(run.folder)).contradictions == []


@pytest.mark.everyday
def test_a_service_that_dies_ends_the_run_which_goes_on_once_it_is_back(
    workspace: Workspace, server: RewardServer
) -> None:
    server.up = 1_000_000
    undisturbed = train(workspace, server, "no outage")
    check(undisturbed)
    server.up = 2 * STEP + 5
    run = train(workspace, server, "outage")
    assert run.code == 1
    assert run.result["status"] == "failed"
    assert run.result["reason"].startswith(
        "step 3: 11 of 16 rewards failed, which is more than reward.max_failed (0.1) allows; the"
        " commonest failure, 11 times: reward.parts.rm failed on sample"
    )
    assert "/score answered 503: " in run.result["reason"]
    assert "in 1 attempts (reward.parts.rm.service.retries)" in run.result["reason"]
    assert run.result["reason"].endswith("the run is saved after step 2: continue with --resume")
    assert run.checkpoint(2).is_dir()
    (warned,) = [line for line in run.lines("more such failures") if "warning" in line]
    assert "left out (reward.on_error: drop)" in warned
    assert len(run.lines("; 10 so far")) == 1
    server.up = 1_000_000
    resumed = train(workspace, server, "outage", "--resume")
    check(resumed)
    assert largest_move(undisturbed, resumed) == 0.0


def test_samples_that_a_short_outage_hits_are_left_out_and_recorded(
    workspace: Workspace, server: RewardServer
) -> None:
    server.up = STEP + 6
    server.mends_after = 3
    run = train(workspace, server, "short outage", "reward.max_failed=0.5")
    assert run.code == 0, run.err
    assert audit(RunDirectory(run.folder)).contradictions == []
    assert [run.rows[step]["rollout/unscored_samples"] for step in range(1, 5)] == [0, 3, 0, 0]
    samples = samples_of(run, 2)
    left_out = [sample for sample in samples if not sample.is_scored]
    given_up = run.rows[2]["rollout/failed_groups"]
    assert len(left_out) == 3 or given_up
    for sample in left_out:
        assert "answered 503" in sample.metadata["reward_error"]
    assert run.rows[2]["episode"] == 2 * STEP - len(left_out)


def test_a_step_without_a_signal_moves_no_weight(
    workspace: Workspace, server: RewardServer
) -> None:
    """Scored 0 all of them, a step has no gradient; Adam's moments would move the weights."""
    server.up = 1_000_000
    one = train(workspace, server, "one step", "training.steps=1")
    server.up = STEP
    run = train(workspace, server, "zeros", "reward.on_error=0.0", "reward.max_failed=1.0")
    check(run)
    assert [run.rows[step]["train/updates_without_signal"] for step in range(1, 5)] == [0, 1, 1, 1]
    assert [run.rows[step]["train/grad_norm"] for step in range(2, 5)] == [0.0, 0.0, 0.0]
    assert run.rows[1]["train/grad_norm"] > 0.0
    assert largest_move(one, run) == 0.0
    assert run.lines("a step trained nothing")
