"""Each estimator and each policy loss takes a real step, with engine, ranks and optimizer."""

from __future__ import annotations

import math

import pytest
from workspace import Workspace

from rlcore.algorithms import metric_spec, policy_loss_names
from rlcore.config.built_in import ESTIMATORS

NAMES = sorted(ESTIMATORS)
LOSSES = [name for name in policy_loss_names() if name != "sft"]
PAIRS = [
    (NAMES[i % len(NAMES)], LOSSES[i % len(LOSSES)]) for i in range(max(len(NAMES), len(LOSSES)))
]

# Two mini-batches, twice: the last three optimizer steps see a policy that has moved. Nothing is
# clipped away at once.
STEPS = ("training.steps=1", "algorithm.epochs=2", "algorithm.minibatches=2",
         "algorithm.kl.loss_coef=0.01", "algorithm.kl.loss_unbiased=true",
         "checkpoint.export_hf=false")  # fmt: skip


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_a_step(workspace: Workspace, estimator: str, loss: str) -> None:
    corrected = (
        ()
        if loss == "decoupled_ppo"
        else ("algorithm.correction={name: icepop, max_staleness: 0}",)
    )
    shaped = ("algorithm.kl.reward_coef=0.05",) if ESTIMATORS[estimator].shaped_rewards else ()
    named = (f"algorithm.estimator.name={estimator}", f"algorithm.loss.name={loss}")
    run = workspace.train(f"{estimator} {loss}", *STEPS, *named, *corrected, *shaped)
    assert run.code == 0, run.err
    (row,) = run.metrics
    assert row["train/optimizer_steps"] == 4
    assert row["train/skipped_updates"] == 0
    assert row["train/grad_norm"] > 0
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
    assert [name for name in row if metric_spec(name) is None] == []
    assert ("correction/ess" in row) is bool(corrected)
