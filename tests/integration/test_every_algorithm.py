"""Each estimator and each policy loss takes a real step, with engine, ranks and optimizer.

The recorded advantages are those of the estimator on the recorded samples.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from workspace import Run, Workspace

from rlcore.algorithms import EstimatorInputs, build_estimator, metric_spec, policy_loss_names
from rlcore.config.built_in import ESTIMATORS
from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample
from rlcore.runs.rollouts import read_rollouts

# Those that learn from rows have their runs in test_preference_runs.py.
NAMES = sorted(name for name, declared in ESTIMATORS.items() if not declared.preferences)
LOSSES = [name for name in policy_loss_names() if name != "sft"]
PAIRS = [
    (NAMES[i % len(NAMES)], LOSSES[i % len(LOSSES)]) for i in range(max(len(NAMES), len(LOSSES)))
]

# Two mini-batches, twice: the last three optimizer steps see a policy that has moved. Nothing is
# clipped away at once.
STEPS = ("training.steps=1", "algorithm.epochs=2", "algorithm.minibatches=2",
         "algorithm.kl.loss_coef=0.01", "algorithm.kl.loss_unbiased=true",
         "algorithm.normalize_advantages=none", "checkpoint.export_hf=false")  # fmt: skip
# what a recording holds beyond rewards; not the values of a critic
FROM_SAMPLES = {
    "rollout_logprobs", "versions", "rollout_ids", "baseline_rewards", "reward_parts",
}  # fmt: skip


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_a_step(workspace: Workspace, estimator: str, loss: str) -> None:
    corrected = (
        ()
        if loss == "decoupled_ppo"
        else ("algorithm.correction={name: icepop, max_staleness: 0}",)
    )
    # estimators with a critic cannot be compared with recordings, which lack the KL too
    has_critic = "values" in ESTIMATORS[estimator].needs
    shaped = ("algorithm.kl.reward_coef=0.05",) if has_critic else ()
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
    assert ("loss/value_avg" in row) == has_critic
    check_advantages(run, estimator)


def check_advantages(run: Run, name: str) -> None:
    records = read_rollouts(run.rollouts(1))
    recorded = torch.tensor(
        np.concatenate([record["advantages"] for record in records]), dtype=torch.float32
    )
    assert torch.isfinite(recorded).all()
    assert recorded.abs().max() > 0.0
    estimator = build_estimator(name)
    if not estimator.needs <= FROM_SAMPLES:
        return
    batch = RolloutBatch.from_samples(
        [Sample.from_record(record) for record in records],
        reward_parts=[*records[0]["reward_parts"]],
    )
    given = {field: batch.vectors[field] for field in ("rewards", "group_ids", *estimator.needs)}
    made = estimator(EstimatorInputs(cu_seqlens=batch.cu_seqlens, **given))
    assert torch.allclose(made.advantages, recorded, rtol=1e-5, atol=1e-6)
