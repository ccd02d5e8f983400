"""Small batches with their results worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.algorithms import EstimatorInputs, InputError, build_estimator

from .helpers import cu

# Three samples of one prompt with 1, 2 and 3 tokens, mixed with two of another and one alone.
REWARDS = [1.0, 5.0, 0.0, 8.0, 2.0, 4.0]
GROUPS = [7, 3, 7, 3, 7, -1]
LENGTHS = (1, 1, 2, 3, 3, 1)


def scores(name: str, rewards: list[float] = REWARDS, **options: float | bool) -> list[float]:
    """Return the advantage of each sequence of the batch above, the same on all its tokens."""
    inputs = EstimatorInputs(
        cu_seqlens=cu(LENGTHS),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(GROUPS),
    )
    parts = build_estimator(name, **options)(inputs).advantages.split(LENGTHS)
    assert all(part.eq(part[0]).all() for part in parts)
    return [float(part[0]) for part in parts]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [0.0, -1.5, -1.0, 1.5, 1.0, 0.0]),  # means 1, 6.5
        ("grpo", [0.0, -1.5 / 4.5**0.5, -1.0, 1.5 / 4.5**0.5, 1.0, 0.0]),  # stds 1, sqrt(4.5)
        ("rloo", [0.0, -3.0, -1.5, 3.0, 1.5, 0.0]),  # the others: 1, 8, 1.5, 5, .5
        ("reinforce++_baseline", [0.0, -1.5, -1.0, 1.5, 1.0, 0.0]),
        # (1 + 0 + 6) / 6 and (5 + 24) / 4
        ("opo", [-1 / 6, 5 - 29 / 4, -7 / 6, 8 - 29 / 4, 5 / 6, 0.0]),
        ("gpg", [0.0, -1.8, -1.2, 1.8, 1.2, 0.0]),  # alpha 6 / 5: the one alone has no gradient
        ("max_rl", [0.0, -1.5 / 6.5, -1.0, 1.5 / 6.5, 1.0, 0.0]),
    ],
)
def test_groups_are_shuffled_and_one_has_one_member(name: str, expected: list[float]) -> None:
    assert scores(name) == pytest.approx(expected, rel=2e-6, abs=1e-12)


def test_grpo_leaves_the_sample_out_of_its_baseline_but_not_of_its_std() -> None:
    assert scores("grpo", leave_one_out=True, eps=1e-12) == pytest.approx(
        [0.0, -3 / 4.5**0.5, -1.5, 3 / 4.5**0.5, 1.5, 0.0]
    )
    assert scores("grpo", leave_one_out=True, normalize_std=False) == pytest.approx(scores("rloo"))


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "max_rl", "reinforce++_baseline"]
)
@pytest.mark.parametrize("value", [0.1, 0.0, 1e4, -1 / 3])
def test_equal_rewards_earn_exactly_nothing(name: str, value: float) -> None:
    assert scores(name, rewards=[value] * 6) == [0.0] * 6


def test_max_rl_weighs_a_success_by_its_rarity() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=cu((1,) * 8),
        rewards=torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]),
        group_ids=torch.tensor([0] * 4 + [1] * 2 + [2] * 2),
    )
    assert build_estimator("max_rl")(inputs).advantages.tolist() == [3] + [-1] * 3 + [0] * 4


def test_max_rl_does_not_turn_around_where_the_mean_is_negative() -> None:
    assert scores("max_rl", rewards=[-1.0, 1.0, -2.0, 3.0, 0.0, 1.0]) == pytest.approx(
        [0, -0.5, 0, 0.5, 0, 0]
    )


def test_gpg_counts_groups_with_a_gradient_not_rewards() -> None:
    # the first group is all right: 4 samples, 2 of them with a gradient
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0])
    inputs = EstimatorInputs(
        cu_seqlens=cu((1,) * 4), rewards=rewards, group_ids=torch.tensor([0, 0, 1, 1])
    )
    assert build_estimator("gpg")(inputs).advantages.tolist() == [0.0, 0.0, -1.0, 1.0]


def gdpo_scores(parts: list[list[float]], groups: list[int], **options: Any) -> list[float]:
    """Return the advantage of each sequence, of which the first is the longest."""
    lengths = [5, *[1] * (len(parts) - 1)]
    inputs = EstimatorInputs(
        cu_seqlens=cu(lengths),
        rewards=torch.zeros(len(parts), dtype=torch.float64),
        group_ids=torch.tensor(groups),
        reward_parts=torch.tensor(parts, dtype=torch.float64),
    )
    each = build_estimator("gdpo", eps=1e-12, **options)(inputs).advantages.split(lengths)
    return [float(one[0]) for one in each]


def test_gdpo_tells_groups_apart_in_which_more_parts_differ() -> None:
    # parts differ by +-1 / sqrt(2) in units of their std: sums +-0.707 and +-1.414, var 5 / 3
    parts = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    expected = [0.3**0.5, 1.2**0.5, -(0.3**0.5), -(1.2**0.5)]
    assert gdpo_scores(parts, [7, 3, 7, 3]) == pytest.approx(expected)


def test_gdpo_weighs_parts_by_their_weight_and_not_by_their_scale() -> None:
    # a: 0 1 2, b: 200 100 0 in one group; both are -1 0 1 in units of their std
    parts = [[0.0, 200.0], [1.0, 100.0], [2.0, 0.0]]
    opposite = [[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]]
    assert gdpo_scores(opposite, [1, 1, 1]) == pytest.approx([0.0, 0.0, 0.0])
    assert gdpo_scores(parts, [1, 1, 1], reward_weights=[1.0, 0.5]) == pytest.approx([-1, 0, 1])
    assert gdpo_scores(parts, [1, 1, 1], reward_weights=[1, 3]) == pytest.approx([1, 0, -1])


def test_gdpo_leaves_a_part_that_gave_no_score_out() -> None:
    nan = float("nan")
    # a of the third failed: +-0.707 of the others, 0 of it; b: -1 0 1; sums -1.707 0.707 1
    parts = [[0.0, 0.0], [1.0, 1.0], [nan, 2.0]]
    sums = torch.tensor([-(0.5**0.5) - 1.0, 0.5**0.5, 1.0], dtype=torch.float64)
    expected = ((sums - sums.mean()) / sums.std()).tolist()
    assert gdpo_scores(parts, [1, 1, 1]) == pytest.approx(expected)
    # where b is for another source of rows, a alone counts
    alone = [[0.0, nan], [1.0, nan], [2.0, nan]]
    assert gdpo_scores(alone, [1, 1, 1]) == pytest.approx([-1.0, 0.0, 1.0])


def test_gdpo_wants_a_weight_for_each_part() -> None:
    with pytest.raises(InputError, match="reward_weights has 1 numbers, reward_parts has 2"):
        gdpo_scores([[0.0, 1.0]], [1], reward_weights=[1.0])


def test_gae_across_a_tool_call() -> None:
    # [a a obs obs a a]: the observations are not there, so one gamma and one lambda lie between .3
    # and .33
    inputs = EstimatorInputs(
        cu_seqlens=cu((4,)), rewards=torch.tensor([1.0]), group_ids=torch.tensor([0]),
        values=torch.tensor([0.2, 0.3, 0.33, 0.4]),
    )  # fmt: skip
    result = build_estimator("ppo", gamma=1.0, lam=0.95)(inputs)
    # .1 + .95 * .638; .03 + .95 * .64; .07 + .95 * .6; 1 - .4
    expected = torch.tensor([0.7061, 0.638, 0.64, 0.6])
    torch.testing.assert_close(result.advantages, expected)
    torch.testing.assert_close(result.returns, expected + torch.tensor([0.2, 0.3, 0.33, 0.4]))


def test_the_targets_of_the_critic_have_the_kl_in_them() -> None:
    values = torch.tensor([0.1, 0.2])
    inputs = EstimatorInputs(
        cu_seqlens=cu((2,)), rewards=torch.tensor([1.0]), group_ids=torch.tensor([0]),
        kl=torch.tensor([0.5, 0.25]), values=values,
    )  # fmt: skip
    result = build_estimator("ppo", lam=1.0, kl_coef=0.4)(inputs)
    assert result.returns is not None
    torch.testing.assert_close(result.returns, torch.tensor([1 - 0.2 - 0.1, 1 - 0.1]))
    torch.testing.assert_close(result.returns, result.advantages + values)


def test_vapo_takes_lambda_from_the_length() -> None:
    # alpha 0.5: lambda is 1 - 1 / (0.5 * 4) = 0.5 with four tokens, 0 with two or one
    inputs = EstimatorInputs(
        cu_seqlens=cu((4, 2, 1)), rewards=torch.tensor([1.0, 1.0, 1.0]), group_ids=torch.tensor([0,
        0, 0]),
        values=torch.tensor([0.2, 0.3, 0.33, 0.4, 0.5, 0.6, 0.7]),
    )  # fmt: skip
    result = build_estimator("vapo", alpha=0.5)(inputs)
    expected = torch.tensor([0.2775, 0.355, 0.65 - 0.28, 0.6, 0.1, 0.4, 0.3])
    expected[2] = 0.07 + 0.5 * 0.6  # .37; then .03 + .5 * .37 = .215; .1 + .5 * .215 = .2075
    expected[1] = 0.215
    expected[0] = 0.2075
    torch.testing.assert_close(result.advantages, expected)
    # critic_lam 1: the Monte-Carlo return
    torch.testing.assert_close(result.returns, torch.ones(7))


def test_reinforce_pp_rewards_the_first_turn() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=cu((3, 0, 1)), rewards=torch.tensor([1.0, 9.0, -2.0]), group_ids=torch.tensor([0,
        1, 2]),
        kl=torch.tensor([0.1, 0.2, 0.3, 0.0]),
    )  # fmt: skip
    result = build_estimator("reinforce++", kl_coef=1.0)(inputs)
    torch.testing.assert_close(result.advantages, torch.tensor([0.4, 0.5, 0.7, -2.0]))


def turns() -> EstimatorInputs:
    """Two samples of a prompt, with a KL, a teacher and a greedy sample."""
    return EstimatorInputs(
        cu_seqlens=cu((2, 1)), rewards=torch.tensor([1.0, 0.0]), group_ids=torch.tensor([4, 4]),
        kl=torch.tensor([0.1, 0.2, 0.4]), logprobs=torch.tensor([-1.0, -2.0, -1.0]),
        teacher_logprobs=torch.tensor([-1.5, -1.0, -1.0]), baseline_rewards=torch.tensor([0.25,
        0.5]),
    )  # fmt: skip


def test_rloo_subtracts_the_kl_of_the_whole_sequence() -> None:
    result = build_estimator("rloo", kl_coef=1.0)(turns())  # returns .7 and -.4
    torch.testing.assert_close(result.advantages, torch.tensor([1.1, 1.1, -1.1]))


def test_reinforce_pp_baseline_does_not_accumulate_the_kl() -> None:
    result = build_estimator("reinforce++_baseline", kl_coef=1.0)(turns())
    torch.testing.assert_close(result.advantages, torch.tensor([0.4, 0.3, -0.9]))


def test_remax_subtracts_the_reward_of_the_greedy_sample() -> None:
    result = build_estimator("remax", kl_coef=1.0)(turns())
    # .7 and .8 less .25; -.4 less .5
    torch.testing.assert_close(result.advantages, torch.tensor([0.45, 0.55, -0.9]))
    torch.testing.assert_close(result.returns, torch.tensor([0.7, 0.8, -0.4]))


def test_distillation_rewards_what_the_teacher_finds_likelier() -> None:
    alone = {"gamma": 0.0, "distill_coef": 0.5}  # gamma 0: each token sees its own reward
    result = build_estimator("reinforce++", **alone)(turns())
    torch.testing.assert_close(result.advantages, torch.tensor([-0.25, 1.5, 0.0]))
    result = build_estimator("reinforce++_baseline", distill_coef=0.5)(turns())
    torch.testing.assert_close(result.advantages, torch.tensor([0.25, 1.0, -0.5]))
