"""Every estimator and policy loss that is registered, through the whole loop: each gets what it needs, and trains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lab import LEARNING, Lab

from rlcore.algorithms import EstimatorInputs, build_estimator, estimator_names, policy_loss_names
from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample
from rlcore.runs.rollouts import read_rollouts

SHORT = (*LEARNING, "training.steps=2", "checkpoint.export_hf=false")
USUAL_ESTIMATORS = {"vapo", "rloo", "opo"}          # in the default tier; the others in the full one
USUAL_LOSSES = {"gspo", "clip_cov", "decoupled_ppo"}
FROM_SAMPLES = {"rollout_logprobs", "versions", "rollout_ids", "baseline_rewards"}      # all that a recording holds


def of_tiers(names: list[str], usual: set[str]) -> list[object]:
    assert usual <= set(names)
    return [pytest.param(name, marks=() if name in usual else pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", of_tiers(estimator_names(), USUAL_ESTIMATORS))
def test_every_estimator_trains(lab: Lab, name: str) -> None:
    """Its recorded advantages are what it makes of the recorded samples, where those are all that it needs."""
    estimator = build_estimator(name)
    run = lab.train(f"estimator {name}", *SHORT, f"algorithm.estimator.name={name}", "algorithm.normalize_advantages=none")
    assert run.code == 0, run.err
    for step in (1, 2):
        records = read_rollouts(run.rollouts(step))
        batch = RolloutBatch.from_samples([Sample.from_record(record) for record in records])
        recorded = torch.tensor(np.concatenate([record["advantages"] for record in records]), dtype=torch.float32)
        assert torch.isfinite(recorded).all()
        if estimator.needs <= FROM_SAMPLES:
            given = {field: batch.vectors[field] for field in ("rewards", "group_ids", *estimator.needs)}
            made = estimator(EstimatorInputs(cu_seqlens=batch.cu_seqlens, **given))
            assert torch.allclose(made.advantages, recorded, rtol=1e-5, atol=1e-6)
        assert recorded.abs().max() > 0.0
        assert 0.0 < run.rows[step]["train/grad_norm"] < math.inf
        assert ("loss/value_avg" in run.rows[step]) == ("values" in estimator.needs)


@pytest.mark.parametrize("name", of_tiers([name for name in policy_loss_names() if name != "sft"], USUAL_LOSSES))
def test_every_policy_loss_trains(lab: Lab, name: str) -> None:
    """Two optimizer steps a batch, so that the second one is off-policy."""
    run = lab.train(f"loss {name}", *SHORT, f"algorithm.loss.name={name}", "algorithm.minibatches=2")
    assert run.code == 0, run.err
    for step in (1, 2):
        row = run.rows[step]
        assert row["train/optimizer_steps"] == 2.0
        assert row["train/skipped_updates"] == 0.0
        assert math.isfinite(row["loss/policy_avg"])
        assert 0.0 < row["train/grad_norm"] < math.inf


@pytest.mark.parametrize(
    ("estimator", "loss"),
    [("reinforce++_baseline", "cispo"), pytest.param("remax", "gspo_token", marks=pytest.mark.full),
     pytest.param("vapo", "kl_cov", marks=pytest.mark.full), pytest.param("max_rl", "geo_mean", marks=pytest.mark.full)],
)  # fmt: skip
def test_pairs_train_with_everything_else_on(lab: Lab, estimator: str, loss: str) -> None:
    """A correction, KL in the loss, an entropy bonus, epochs, and another aggregation."""
    terms = ("algorithm.kl.loss_coef=0.1", "algorithm.entropy_coef=0.01", "algorithm.correction.name=tis",
             "algorithm.loss.aggregation=seq-mean-token-mean", "algorithm.epochs=2", "algorithm.minibatches=2")  # fmt: skip
    run = lab.train(
        f"{estimator} {loss}", *SHORT, *terms, f"algorithm.estimator.name={estimator}", f"algorithm.loss.name={loss}"
    )
    assert run.code == 0, run.err
    row = run.rows[2]
    assert row["train/optimizer_steps"] == 4.0
    assert {"objective/kl", "policy/entropy_avg", "loss/policy_avg"} <= set(row)
    assert 0.0 < row["train/grad_norm"] < math.inf
