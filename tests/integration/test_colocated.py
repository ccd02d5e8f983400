"""Runs whose trainer and engine share a device, bit-equal to runs with a device for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_runs import RankRuns
from workspace import LEARNING, Run, Workspace, learned

from rollout.engines.embedded.engine import EmbeddedEngine

COLOCATED = "rollout.engine.colocated=true"
# Everything that has a turn: two models and a reference, two optimizer steps, checkpoints, those in
# the background too.
PPO = (
    *LEARNING, "algorithm.estimator.name=ppo", "algorithm.kl.reward_coef=0.01",
    "algorithm.minibatches=2", "critic.optimizer.lr=1e-3", "checkpoint.every=1",
    "checkpoint.keep=9", "evaluation.every=2", "evaluation.max_prompts=4",
)  # fmt: skip


def assert_same(run: Run, other: Run) -> None:
    assert len(run.metrics) > 1
    assert learned(run.metrics) == learned(other.metrics)
    mine = run.weights
    others = other.weights
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.fixture(scope="module")
def apart(workspace: Workspace) -> Run:
    run = workspace.train("colocated apart", *PPO, workspace.heldout)
    assert run.code == 0, run.err
    return run


@pytest.mark.everyday
def test_taking_turns_changes_no_bit(
    workspace: Workspace, apart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_bytes: list[int] = []

    class Watched(EmbeddedEngine):
        """Keeps how many bytes of weights it held when it had given memory back."""

        async def release_memory(self, tags: Any) -> None:
            await super().release_memory(tags)
            assert self._weights is not None
            held_bytes.append(
                sum(t.untyped_storage().nbytes() for t in self._weights.tensors.values())
            )

    monkeypatch.setattr("rollout.engines.embedded.factory.EmbeddedEngine", Watched)
    colocated = workspace.train("colocated", *PPO, workspace.heldout, COLOCATED)
    assert colocated.code == 0, colocated.err
    assert_same(colocated, apart)
    assert all(row["time/handover"] > 0 for row in colocated.metrics)
    # Before training and in each of 3 steps everything goes; after the two evaluations a checkpoint
    # needs room for the trainer.
    assert [size == 0 for size in held_bytes] == [True, True, True, False, True, False]
    assert not any("time/handover" in row for row in apart.metrics)


def test_it_resumes_and_is_evaluated(workspace: Workspace, apart: Run) -> None:
    cut = workspace.train("colocated cut", *PPO, workspace.heldout, COLOCATED, "training.steps=2")
    assert cut.code == 0, cut.err
    resumed = workspace.train("colocated cut", *PPO, workspace.heldout, COLOCATED, "--resume")
    assert resumed.code == 0, resumed.err
    assert learned(resumed.metrics)[-1] == learned(apart.metrics)[-1]
    assert all(torch.equal(w, apart.weights[name]) for name, w in resumed.weights.items())
    scored = workspace.command("eval", str(resumed.folder / "config.yaml"), COLOCATED)
    assert scored.code == 0, scored.err
    assert scored.lines("eval/score")


@pytest.mark.full
def test_an_engine_that_dies_while_the_trainer_has_the_device_comes_back_after_it(
    workspace: Workspace,
) -> None:
    killer = f"{{name: 'colocated_estimator:EngineKiller', marker: {workspace.folder / 'killed'}}}"
    run = workspace.train(
        "colocated killed", *LEARNING, COLOCATED, "rollout.service=process",
        "training.steps=4", f"algorithm.estimator={killer}",
        "rollout.engine.restart.backoff_s=0.01",
    )  # fmt: skip
    assert run.code == 0, run.err
    assert [row["rollout/engine_restarts"] for row in run.metrics] == [0, 0, 1, 0]
    plain = workspace.train("colocated unharmed", *LEARNING, "training.steps=4")
    ours = [row["loss/policy_avg"] for row in run.metrics]
    assert ours == [row["loss/policy_avg"] for row in plain.metrics]


def test_when_none_can_be_started_again_what_was_trained_is_kept(workspace: Workspace) -> None:
    marker = workspace.folder / "killed for good"
    killer = f"{{name: 'colocated_estimator:EngineKiller', marker: {marker}}}"
    run = workspace.train(
        "colocated lost", *LEARNING, COLOCATED, "rollout.service=process",
        f"algorithm.estimator={killer}", "rollout.engine.restart.limit=0",
    )  # fmt: skip
    assert run.code == 1
    assert run.lines("no engine is left, and none can be started again (rollout.engine.restart)")
    assert run.lines("the run is saved after step 2: continue with --resume")
    resumed = workspace.train("colocated lost", *LEARNING, COLOCATED, "--resume")
    assert resumed.code == 0, resumed.err
    assert resumed.result["steps"] == 3


@pytest.mark.full
def test_two_ranks_and_an_engine_of_its_own(workspace: Workspace, rank_runs: RankRuns) -> None:
    layout = (
        workspace.heldout,
        "policy.parallel.tensor=2",
        "policy.parallel.sequence=true",
        "rollout.service=process",
    )
    apart = rank_runs.train("colocated-ranks-apart", *PPO, *layout)
    colocated = rank_runs.train("colocated-ranks", *PPO, *layout, COLOCATED)
    assert (apart.code, colocated.code) == (0, 0), colocated.said
    assert learned(colocated.rows) == learned(apart.rows)
