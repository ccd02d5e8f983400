"""The logged KL is the raw KL: transformers finds it from the saved weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from accounting_checks import samples_of
from hf_logprobs import logprobs, policy_before
from torch import Tensor
from workspace import LEARNING, Run, Workspace, same

KL_METRICS = {"rollout/kl", "objective/kl", "rollout/kl_clamped_share"}
EVERY_WEIGHT = ("checkpoint.every=1", "checkpoint.keep=9", "checkpoint.export_hf=false")
COEF = 0.3


@dataclass(frozen=True)
class Fresh:
    """KL of one step's samples, by transformers in float64 from the weights before the step."""

    per_token: float  # mean over trainable tokens
    per_sequence: float  # mean over sequences of the token sum


def estimate(kind: str, d: Tensor) -> Tensor:
    return {"k1": d, "k2": d.square() / 2, "k3": torch.exp(-d) - 1 + d}[kind]


def fresh_kl(workspace: Workspace, run: Run, step: int, kind: str) -> Fresh:
    samples = samples_of(run, step)
    policy = policy_before(workspace, run, step)
    pairs = zip(logprobs(policy, samples), logprobs(workspace.model, samples), strict=True)
    kl = [estimate(kind, own - reference) for own, reference in pairs]
    return Fresh(
        float(torch.cat(kl).mean()), float(torch.stack([values.sum() for values in kl]).mean())
    )


def assert_raw(workspace: Workspace, run: Run, kind: str, *, coef: float) -> None:
    assert run.code == 0, run.err
    for step in (2, 3):
        row = run.rows[step]
        fresh = fresh_kl(workspace, run, step, kind)
        assert fresh.per_token != 0.0
        assert same(row["rollout/kl"], fresh.per_token, rel=1e-3, abs_=1e-6), (
            row["rollout/kl"],
            fresh,
        )
        assert same(row["objective/kl"], fresh.per_sequence, rel=1e-3, abs_=5e-6), (
            row["objective/kl"],
            fresh,
        )
        assert row["objective/non_score_reward"] == -coef * row["objective/kl"]
        assert same(
            row["objective/rlhf_reward"],
            row["objective/scores"] + row["objective/non_score_reward"],
        )
        assert row["rollout/kl_clamped_share"] == 0.0
    assert run.rows[1]["rollout/kl"] == 0.0, (
        "before the first step the policy is the reference, bit for bit"
    )


PPO = ("algorithm.estimator.name=ppo", "critic.optimizer.lr=1e-3")


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("k1", ()),
        ("k2", ("algorithm.minibatches=2", "algorithm.old_logprobs=rollout")),
        ("k3", ("critic.warmup_steps=1", "policy.optimizer.schedule=linear")),
    ],
)
def test_ppo_with_kl_in_the_reward_logs_the_raw_kl(
    workspace: Workspace, kind: str, options: tuple[str, ...]
) -> None:
    """Shaped rewards, several optimizer steps, and critic-only steps do not change it."""
    coefficient = (f"algorithm.kl.reward_coef={COEF}", f"algorithm.kl.reward_kind={kind}")
    run = workspace.train(
        f"ppo-{kind}",
        *LEARNING,
        *EVERY_WEIGHT,
        *PPO,
        *coefficient,
        *options,
        "algorithm.kl.loss_coef=0.05",
    )
    if "critic.warmup_steps=1" in options:
        assert run.rows[2]["rollout/kl"] == 0.0
        assert "policy/approxkl_avg" not in run.rows[1]
        assert same(run.rows[3]["lr"], run.rows[2]["lr"] / 2), "two steps train the policy"
        assert same(
            run.rows[3]["rollout/kl"],
            fresh_kl(workspace, run, 3, kind).per_token,
            rel=1e-3,
            abs_=1e-6,
        )
    else:
        assert_raw(workspace, run, kind, coef=COEF)


@pytest.mark.parametrize(
    "options",
    [
        # measured by the one update itself
        ("algorithm.kl.monitor=true",),
        ("algorithm.kl.loss_coef=0.2",),
        ("algorithm.kl.monitor=true", "algorithm.minibatches=2", "algorithm.old_logprobs=rollout"),
        ("algorithm.kl.monitor=true", *PPO, "critic.warmup_steps=1"),
    ],
    ids=["monitor", "loss", "several updates", "critic warm-up"],
)
def test_watched_kl_is_the_same_kl(
    workspace: Workspace, options: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    run = workspace.train(
        name, *LEARNING, *EVERY_WEIGHT, "algorithm.kl.reward_kind=k3", "training.steps=4", *options
    )
    assert run.code == 0, run.err
    assert all(set(row) >= KL_METRICS for row in run.metrics)
    if name != "critic warm-up":
        assert_raw(workspace, run, "k3", coef=0.0)
    row = run.rows[4]
    fresh = fresh_kl(workspace, run, 4, "k3")
    assert same(row["rollout/kl"], fresh.per_token, rel=1e-3, abs_=1e-6)
    assert same(row["objective/kl"], fresh.per_sequence, rel=1e-3, abs_=5e-6)


def test_a_pass_of_its_own_and_the_update_measure_the_same(workspace: Workspace) -> None:
    shared = (
        *LEARNING,
        "algorithm.kl.monitor=true",
        "algorithm.kl.reward_kind=k3",
        "checkpoint.export_hf=false",
    )
    by_update = workspace.train("by update", *shared)
    by_pass = workspace.train("by pass", *shared, "algorithm.old_logprobs=recompute")
    gap = "rollout/train_rollout_logprob_diff"
    for step in (1, 2, 3):
        for name in (
            *KL_METRICS,
            "objective/entropy",
            "policy/entropy_avg",
            gap,
            f"{gap}_max",
            f"{gap}_kl",
            "rollout/ess",
        ):
            assert same(by_update.rows[step][name], by_pass.rows[step][name]), name


def test_an_update_that_is_not_the_only_one_measures_nothing_of_the_batch(
    workspace: Workspace,
) -> None:
    """Later updates see a moved policy: metrics of the policy before the step are left out."""
    several = (
        "algorithm.minibatches=2",
        "algorithm.old_logprobs=rollout",
        "checkpoint.export_hf=false",
    )
    run = workspace.train("moved", *LEARNING, *several)
    for row in run.metrics:
        assert not {"objective/entropy", *KL_METRICS} & set(row)
        # compared with the engine's in a pass
        assert ("rollout/train_rollout_logprob_diff" in row) == (row["step"] == 1)
        assert {"policy/entropy_avg", "policy/approxkl_avg"} <= set(row)


def test_without_a_coefficient_there_is_no_kl(workspace: Workspace) -> None:
    run = workspace.train("no kl", *LEARNING, "checkpoint.export_hf=false")
    assert "models     policy\n" in run.out
    for row in run.metrics:
        assert not KL_METRICS & set(row)
        assert row["objective/non_score_reward"] == 0.0
        assert row["objective/rlhf_reward"] == row["objective/scores"]


BAD_ESTIMATORS = """
from rlcore.algorithms import Advantages, EstimatorInputs, expand_to_tokens

class Shapes:
    needs = {"kl"}

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        rewards = expand_to_tokens(inputs.rewards, inputs.cu_seqlens)
        rewards -= inputs.kl.mul_(0.1)
        return Advantages(rewards)

class Short:
    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        return Advantages(inputs.rewards)

class NoTargets:
    needs = {"values"}

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        return Advantages(inputs.values)
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Shapes", "estimator 'kl_plugins:Shapes' wrote into its input 'kl'; inputs are read-only"),
        ("Short", "estimator 'kl_plugins:Short': advantages: expected shape [M]"),
        ("NoTargets", "'kl_plugins:NoTargets' needs values but returned no returns"),
    ],
)
def test_an_estimator_that_breaks_a_rule_ends_the_run_in_one_line(
    workspace: Workspace, name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, since the run had begun; bad input that shows before is exit code 2."""
    (tmp_path / "kl_plugins.py").write_text(BAD_ESTIMATORS)
    monkeypatch.syspath_prepend(tmp_path)
    run = workspace.train(f"bad-{name}", f"algorithm.estimator.name=kl_plugins:{name}")
    assert run.code == 1
    (line,) = run.err.strip().splitlines()
    assert line.startswith("rlcore: algorithm.estimator: ")
    assert says in line
    assert run.result["status"] == "failed"
    assert says in run.result["reason"]
    assert run.metrics == []
