"""Wrong metrics seen in other trainers: each formula fails the test that ours passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import (
    EstimatorInputs,
    Moments,
    PolicyLossInputs,
    approx_kl,
    build_estimator,
    build_policy_loss,
    loss_weights,
    policy_loss_names,
    rollout_metrics,
)

from .helpers import cu

LENGTHS = [40, 3, 121, 12]
PADDED = 896 + 121  # all responses are padded to one length


def noise(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded(x: Tensor, fill: float) -> Tensor:
    """[B, PADDED], as most trainers hold what we hold as [M]."""
    table = torch.full((len(LENGTHS), PADDED), fill, dtype=x.dtype)
    for row, part in zip(table, x.split(LENGTHS)):
        row[: len(part)] = part
    return table


@pytest.fixture
def step() -> dict[str, Tensor]:
    """Vectors of a step [M]: log-probs before, after and of the reference; entropy, advantages."""
    size = sum(LENGTHS)
    before = -noise(size, 0).abs()
    return {
        "before": before,
        "after": before + 0.3 * noise(size, 1),
        "reference": before + 0.2 * noise(size, 2),
        "entropy": noise(size, 3).abs(),
        "advantages": noise(size, 4),
    }


def batch(step: dict[str, Tensor]) -> EstimatorInputs:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    return EstimatorInputs(
        cu_seqlens=cu(LENGTHS), rewards=rewards, group_ids=torch.tensor([0, 0, 1, 1]), logprobs=step
        ["before"],
        ref_logprobs=step["reference"], kl=approx_kl(step["before"], step["reference"], "k1"),
        values=noise(sum(LENGTHS), 5),
    )  # fmt: skip


def update(
    step: dict[str, Tensor], first: int = 0, last: int = len(LENGTHS), name: str = "ppo_clip"
) -> Moments:
    """What an optimizer step reports of the sequences [first, last)."""
    borders = cu(LENGTHS)
    loss = build_policy_loss(name)
    moments = Moments()
    tokens = slice(int(borders[first]), int(borders[last]))
    inputs = PolicyLossInputs(
        cu_seqlens=borders[first : last + 1] - borders[first], logprobs=step["after"][tokens],
        old_logprobs=step["before"][tokens], advantages=step["advantages"][tokens], entropy=step[
        "entropy"][tokens],
        rollout_logprobs=step["before"][tokens], ref_logprobs=step["reference"][tokens],
        versions=torch.zeros(tokens.stop - tokens.start).long(), sequence_ids=torch.arange(first,
        last),
    )  # fmt: skip
    inputs = replace(inputs, batch_stats=loss.batch_stats(inputs))
    moments.add_objective(loss(inputs), loss_weights("token-mean", borders)[tokens])
    return moments


def per_sequence_mean(x: Tensor) -> float:
    return sum(part.sum().item() for part in x.split(LENGTHS)) / len(LENGTHS)


def test_objective_entropy_counts_no_padding(step: dict[str, Tensor]) -> None:
    """open-instruct and TRL: padded log-probs are 1.0, and the sum counts them."""
    truth = per_sequence_mean(-step["before"])
    ours = rollout_metrics(batch(step), entropy=-step["before"])["objective/entropy"]
    defective = (-padded(step["before"], fill=1.0)).sum(1).mean().item()
    assert ours == pytest.approx(truth, rel=1e-12)
    assert ours > 0
    assert defective < -800  # an entropy, below 0
    assert defective != pytest.approx(truth, rel=0.1)


def test_approxkl_is_not_diluted_by_padding(step: dict[str, Tensor]) -> None:
    """open-instruct and TRL: the mean runs over the padded table, where the difference is 0."""
    squares = 0.5 * (step["after"] - step["before"]).square()
    ours = update(step).reduce()["policy/approxkl_avg"]
    defective = (
        (0.5 * (padded(step["after"], 1.0) - padded(step["before"], 1.0)).square()).mean().item()
    )
    assert ours == pytest.approx(squares.mean().item(), rel=1e-12)
    assert defective < ours / 8


def test_the_ratio_is_not_pulled_to_one_by_padding(step: dict[str, Tensor]) -> None:
    """open-instruct and TRL: padding has ratio 1, which hides mean and variance of the tokens."""
    ratio = (step["after"] - step["before"]).exp()
    ours = update(step).reduce()
    defective = (padded(step["after"], 1.0) - padded(step["before"], 1.0)).exp()
    assert ours["val/ratio"] == pytest.approx(ratio.mean().item(), rel=1e-12)
    assert ours["val/ratio_var"] == pytest.approx(ratio.var().item(), rel=1e-9)
    assert defective.mean().item() - 1 < (ours["val/ratio"] - 1) / 8
    assert defective.var().item() < ours["val/ratio_var"] / 8


@pytest.mark.parametrize("name", policy_loss_names())
def test_policy_entropy_is_measured_for_every_loss(step: dict[str, Tensor], name: str) -> None:
    """open-instruct: `policy/entropy_avg` is the mean of a table that nothing fills, always 0."""
    truth = step["entropy"].mean().item()
    defective = torch.zeros(len(LENGTHS)).mean().item()
    assert update(step, name=name).reduce()["policy/entropy_avg"] == pytest.approx(truth, rel=1e-12)
    assert defective != pytest.approx(truth, abs=0.1)


def test_non_score_reward_is_minus_the_penalty(step: dict[str, Tensor]) -> None:
    """open-instruct's page says `beta * kl`, but the reward of a positive KL is negative."""
    coef = 0.1
    inputs = batch(step)
    assert inputs.kl is not None
    kl = per_sequence_mean(inputs.kl)
    metrics = rollout_metrics(inputs, reward_coef=coef)
    defective = coef * kl
    assert metrics["objective/non_score_reward"] == pytest.approx(-coef * kl, rel=1e-12)
    assert metrics["objective/rlhf_reward"] == pytest.approx(
        inputs.rewards.mean().item() - coef * kl, rel=1e-12
    )
    assert defective != pytest.approx(metrics["objective/non_score_reward"])


def test_rollout_kl_does_not_depend_on_context_parallelism(step: dict[str, Tensor]) -> None:
    """slime: each of cp_size ranks reports the unmasked sum of the gathered sequence.

    The sums of the ranks are then added.
    """
    cp_size = 4
    inputs = batch(step)
    assert inputs.kl is not None
    truth = inputs.kl.mean().item()
    ours = rollout_metrics(inputs)["rollout/kl"]
    multiplied = sum(inputs.kl.sum().item() for _ in range(cp_size)) / inputs.kl.numel()
    assert ours == pytest.approx(truth, rel=1e-12)
    assert multiplied == pytest.approx(cp_size * truth, rel=1e-12)
    assert multiplied != pytest.approx(ours)
    # Our way to put ranks together: sequences are on one data-parallel rank each, and
    # context-parallel ranks do not add.
    ranks = [Moments() for _ in range(2)]
    for part, rank in zip((inputs.kl[:43], inputs.kl[43:]), ranks):
        rank.add("rollout/kl", part)
    ranks[0].merge(ranks[1])
    assert ranks[0].reduce()["rollout/kl"] == pytest.approx(truth, rel=1e-12)


def test_rollout_kl_sees_no_tool_tokens() -> None:
    """slime: the mean is over the whole response, tool output included."""
    policy = torch.tensor([-1.0, -2.0, -9.0, -9.0, -1.0])
    reference = torch.tensor([-1.5, -2.5, -1.0, -1.0, -1.5])
    mask = torch.tensor([True, True, False, False, True])
    chosen = EstimatorInputs(
        cu_seqlens=torch.tensor([0, 3]), rewards=torch.ones(1), group_ids=torch.zeros(1).long(),
        kl=approx_kl(policy[mask], reference[mask], "k1"),
    )  # fmt: skip
    defective = approx_kl(policy, reference, "k1").mean().item()
    assert rollout_metrics(chosen)["rollout/kl"] == pytest.approx(0.5)
    assert defective == pytest.approx(-2.9)


def test_the_logged_kl_is_not_the_shaped_reward(step: dict[str, Tensor]) -> None:
    """slime: the PPO branch scaled the KL in place, added the reward, and logged the result."""
    inputs = batch(step)
    assert inputs.kl is not None
    truth = inputs.kl.mean().item()
    for name in ("ppo", "reinforce++"):
        build_estimator(name, kl_coef=0.5)(inputs)
        assert rollout_metrics(inputs)["rollout/kl"] == pytest.approx(truth, rel=1e-12)
    shaped = inputs.kl.clone()
    shaped.mul_(-0.5)
    shaped[cu(LENGTHS)[1:] - 1] += inputs.rewards
    assert shaped.mean().item() != pytest.approx(truth, rel=0.1)


def test_a_metric_is_no_mean_of_micro_batch_means(step: dict[str, Tensor]) -> None:
    """verl and others: the mean of micro-batch means counts a short micro-batch like a long one."""
    parts = [update(step, b, b + 1) for b in range(len(LENGTHS))]
    whole = update(step).reduce()
    means = [part.reduce() for part in parts]
    merged = parts[0]
    for part in parts[1:]:
        merged.merge(part)
    for name in ("policy/approxkl_avg", "policy/entropy_avg", "val/ratio", "val/ratio_var"):
        assert merged.reduce()[name] == pytest.approx(whole[name], rel=1e-12)
        defective = sum(mean[name] for mean in means) / len(means)
        assert defective != pytest.approx(whole[name], rel=1e-3)


def test_an_effective_sample_size_is_no_mean_of_effective_sample_sizes() -> None:
    """slime: `ess_ratio` averages sequences: unequal ones, each even in itself, look perfect."""
    ratio = torch.cat([torch.full((50,), 2.0), torch.full((50,), 0.1)]).double()
    moments = Moments()
    for part in ratio.split(50):
        moments.add("engine_ratio", part)
    truth = (ratio.sum() ** 2 / (100 * ratio.square().sum())).item()
    defective = sum((p.sum() ** 2 / (50 * p.square().sum())).item() for p in ratio.split(50)) / 2
    assert moments.reduce()["rollout/ess"] == pytest.approx(truth, rel=1e-12)
    assert truth < 0.6
    assert defective == pytest.approx(1.0)


def test_a_sequence_without_tokens_is_in_no_mean_over_trained_sequences(
    step: dict[str, Tensor],
) -> None:
    """Over all sequences, `objective/*` would fall with every response that lost all tokens."""
    kl = batch(step).kl
    assert kl is not None
    more = EstimatorInputs(
        cu_seqlens=cu([*LENGTHS, 0]),
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.5, 9.0]),
        group_ids=torch.arange(5),
        kl=kl,
    )
    ours = rollout_metrics(more)
    before = rollout_metrics(batch(step))
    for name in ("objective/kl", "objective/scores", "rollout/kl"):
        assert ours[name] == pytest.approx(before[name], rel=1e-12)
    defective = kl.sum().item() / more.num_sequences
    assert defective != pytest.approx(ours["objective/kl"], rel=0.1)
    assert ours["rollout/reward"] == pytest.approx(11.5 / 5)  # that one is over all, and says so
