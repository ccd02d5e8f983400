from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import EstimatorInputs, MissingInputError, build_estimator, discounted_suffix_sum

from .helpers import cu, permuted

Make = Callable[..., EstimatorInputs]
EVERY = ["ppo", "grpo", "reinforce++"]


def slow_rewards(inputs: EstimatorInputs, kl_coef: float) -> Tensor:
    r = -kl_coef * inputs.kl if inputs.kl is not None else torch.zeros(inputs.num_tokens, dtype=torch.float64)
    if inputs.token_rewards is not None:
        r = r + inputs.token_rewards
    for b, (start, end) in enumerate(zip(inputs.cu_seqlens.tolist(), inputs.cu_seqlens.tolist()[1:])):
        if end > start:
            r[end - 1] += inputs.rewards[b]
    return r


def slow_gae(inputs: EstimatorInputs, gamma: float, lam: float, kl_coef: float) -> Tensor:
    r, v, out = slow_rewards(inputs, kl_coef), inputs.values, torch.zeros(inputs.num_tokens, dtype=torch.float64)
    assert v is not None
    for start, end in zip(inputs.cu_seqlens.tolist(), inputs.cu_seqlens.tolist()[1:]):
        running, following = 0.0, 0.0
        for t in range(end - 1, start - 1, -1):
            running = float(r[t]) + gamma * following - float(v[t]) + gamma * lam * running
            out[t], following = running, float(v[t])
    return out


def slow_grpo(inputs: EstimatorInputs, normalize_std: bool) -> Tensor:
    out = torch.zeros(inputs.num_tokens, dtype=torch.float64)
    borders, groups = inputs.cu_seqlens.tolist(), inputs.group_ids.tolist()
    filled = [b for b in range(inputs.num_sequences) if borders[b + 1] > borders[b]]
    for b in filled:
        peers = inputs.rewards[[c for c in filled if groups[c] == groups[b]]]
        if len(peers) > 1:
            advantage = inputs.rewards[b] - peers.mean()
            out[borders[b] : borders[b + 1]] = advantage / (peers.std() + 1e-6) if normalize_std else advantage
    return out


def test_gae_across_a_tool_call_by_hand() -> None:
    # [a a obs obs a a]: the observations are not there, so one gamma and one lambda lie between .3 and .33
    inputs = EstimatorInputs(
        cu_seqlens=cu((4,)), rewards=torch.tensor([1.0]), group_ids=torch.tensor([0]),
        values=torch.tensor([0.2, 0.3, 0.33, 0.4]),
    )  # fmt: skip
    result = build_estimator("ppo", gamma=1.0, lam=0.95)(inputs)
    expected = torch.tensor([0.7061, 0.638, 0.64, 0.6])  # .1 + .95 * .638; .03 + .95 * .64; .07 + .95 * .6; 1 - .4
    torch.testing.assert_close(result.advantages, expected)
    torch.testing.assert_close(result.returns, expected + torch.tensor([0.2, 0.3, 0.33, 0.4]))


@pytest.mark.parametrize(("gamma", "lam", "kl_coef"), [(1.0, 0.95, 0.0), (0.9, 0.8, 0.1), (1.0, 1.0, 0.5), (0.0, 0, 0)])
def test_ppo_is_gae(make_inputs: Make, gamma: float, lam: float, kl_coef: float) -> None:
    inputs = make_inputs()
    result = build_estimator("ppo", gamma=gamma, lam=lam, kl_coef=kl_coef)(inputs)
    torch.testing.assert_close(result.advantages, slow_gae(inputs, gamma, lam, kl_coef))
    assert result.returns is not None
    torch.testing.assert_close(result.returns, result.advantages + inputs.values)


def test_gae_with_lambda_one_is_the_monte_carlo_return_less_the_value(make_inputs: Make) -> None:
    inputs = make_inputs()
    result = build_estimator("ppo", gamma=0.97, lam=1.0, kl_coef=0.1)(inputs)
    returns = discounted_suffix_sum(slow_rewards(inputs, 0.1), inputs.cu_seqlens, 0.97)
    torch.testing.assert_close(result.advantages, returns - inputs.values)


def test_gae_with_lambda_zero_is_the_temporal_difference(make_inputs: Make) -> None:
    inputs = make_inputs(lengths=(3,), token_rewards=None)
    v0, v1, v2 = inputs.values.tolist()  # type: ignore[union-attr]
    result = build_estimator("ppo", gamma=0.9, lam=0.0)(inputs)
    expected = torch.tensor([0.9 * v1 - v0, 0.9 * v2 - v1, float(inputs.rewards) - v2], dtype=torch.float64)
    torch.testing.assert_close(result.advantages, expected)


@pytest.mark.parametrize("kl_coef", [0.0, 0.25])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_is_the_sum_to_go(make_inputs: Make, gamma: float, kl_coef: float) -> None:
    inputs = make_inputs()
    result = build_estimator("reinforce++", gamma=gamma, kl_coef=kl_coef)(inputs)
    zero_values = replace(inputs, values=torch.zeros_like(inputs.kl))
    torch.testing.assert_close(result.advantages, slow_gae(zero_values, gamma, 1.0, kl_coef))
    assert torch.equal(result.returns, result.advantages)


def test_reinforce_pp_rewards_the_first_turn() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=cu((3, 0, 1)), rewards=torch.tensor([1.0, 9.0, -2.0]), group_ids=torch.tensor([0, 1, 2]),
        kl=torch.tensor([0.1, 0.2, 0.3, 0.0]),
    )  # fmt: skip
    result = build_estimator("reinforce++", kl_coef=1.0)(inputs)
    torch.testing.assert_close(result.advantages, torch.tensor([0.4, 0.5, 0.7, -2.0]))


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_grpo_is_the_loop_over_groups(make_inputs: Make, normalize_std: bool, seed: int) -> None:
    inputs = make_inputs(seed=seed)
    result = build_estimator("grpo", normalize_std=normalize_std)(inputs)
    torch.testing.assert_close(result.advantages, slow_grpo(inputs, normalize_std))


def test_grpo_by_hand_with_shuffled_groups_and_a_group_of_one() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=cu((1, 2, 1, 1, 0)), rewards=torch.tensor([1.0, 5.0, 0.0, 8.0, float("nan")]),
        group_ids=torch.tensor([7, 3, 7, -1, 7]),
    )  # fmt: skip
    inputs = replace(inputs, group_ids=torch.tensor([7, 3, 7, 3, 7]))
    half, one = 0.5 / (0.5**0.5 + 1e-6), 1.5 / (4.5**0.5 + 1e-6)
    result = build_estimator("grpo")(inputs)  # the empty sequence is no member of group 7
    torch.testing.assert_close(result.advantages, torch.tensor([half, -one, -one, -half, one]))
    alone = replace(inputs, group_ids=torch.tensor([7, 3, 7, -1, 7]))
    assert build_estimator("grpo")(alone).advantages.tolist()[1:3] == [0.0, 0.0]


def test_grpo_gives_equal_rewards_exactly_nothing() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=cu((2,) * 7), rewards=torch.full((7,), 0.1), group_ids=torch.zeros(7, dtype=torch.int64)
    )
    assert build_estimator("grpo")(inputs).advantages.eq(0).all()


def test_grpo_ignores_a_shift_and_a_scale_of_the_rewards(make_inputs: Make) -> None:
    inputs = make_inputs()
    moved = replace(inputs, rewards=inputs.rewards * 3 + 100)
    a, b = (build_estimator("grpo")(x).advantages for x in (inputs, moved))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_sequences_does_not_matter(make_inputs: Make, name: str) -> None:
    inputs = make_inputs()
    shuffled, index = permuted(inputs, [4, 8, 0, 6, 1, 5, 2, 7, 3])
    a, b = (build_estimator(name)(x) for x in (inputs, shuffled))
    torch.testing.assert_close(b.advantages, a.advantages[index])
    torch.testing.assert_close(b.returns, a.returns[index])  # type: ignore[index]


@pytest.mark.parametrize("name", EVERY)
def test_an_empty_sequence_changes_nothing(make_inputs: Make, name: str) -> None:
    inputs = make_inputs(lengths=(3, 1, 4))
    padded = replace(
        inputs, cu_seqlens=cu((0, 3, 0, 1, 4, 0)),
        rewards=torch.cat([torch.full((1,), 9.0), inputs.rewards[:1], torch.full((1,), float("nan")),
                           inputs.rewards[1:], torch.full((1,), 5.0)]),
        group_ids=torch.cat([inputs.group_ids[:1], inputs.group_ids[:1], inputs.group_ids[:1], inputs.group_ids[1:],
                             inputs.group_ids[2:]]),
    )  # fmt: skip
    assert torch.equal(build_estimator(name)(padded).advantages, build_estimator(name)(inputs).advantages)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_a_batch_without_tokens_has_no_advantages(make_inputs: Make, name: str, lengths: tuple[int, ...]) -> None:
    assert build_estimator(name)(make_inputs(lengths=lengths)).advantages.shape == (0,)


@pytest.mark.parametrize("name", EVERY)
def test_float32_stays_float32(make_inputs: Make, name: str) -> None:
    inputs = make_inputs()
    narrow = EstimatorInputs(**{
        name: value.float() if value is not None and value.is_floating_point() else value
        for name, value in vars(inputs).items()
    })  # fmt: skip
    result = build_estimator(name)(narrow)
    assert result.advantages.dtype == torch.float32
    torch.testing.assert_close(result.advantages.double(), build_estimator(name)(inputs).advantages, rtol=1e-4, atol=1e-4)


def test_the_kl_stays_raw(make_inputs: Make) -> None:
    inputs = make_inputs()
    before = inputs.kl.clone()  # type: ignore[union-attr]
    for name in ("ppo", "reinforce++"):
        build_estimator(name, kl_coef=0.3)(inputs)
    assert torch.equal(inputs.kl, before)
    assert inputs.kl._version == 0  # type: ignore[union-attr]


def test_needs_follow_the_coefficient() -> None:
    assert build_estimator("ppo").needs == {"values"}
    assert build_estimator("ppo", kl_coef=0.1).needs == {"values", "kl"}
    assert build_estimator("reinforce++").needs == frozenset()
    assert build_estimator("reinforce++", kl_coef=0.1).needs == {"kl"}
    assert build_estimator("grpo").needs == frozenset()


def test_ppo_without_a_critic_says_what_to_set(make_inputs: Make) -> None:
    with pytest.raises(MissingInputError, match=r"'ppo' needs.*'values' is missing: set critic\.path"):
        build_estimator("ppo")(make_inputs(values=None))
    with pytest.raises(MissingInputError, match=r"'kl' is missing: set algorithm\.kl\.reward_coef"):
        build_estimator("ppo", kl_coef=0.1)(make_inputs(kl=None))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("ppo", {"gamma": 1.5}), ("ppo", {"lam": -0.1}), ("ppo", {"kl_coef": -1.0}), ("grpo", {"eps": 0.0}),
        ("reinforce++", {"gamma": float("nan")}), ("reinforce++", {"kl_coef": float("inf")}),
    ],
)  # fmt: skip
def test_senseless_settings_are_refused(name: str, kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        build_estimator(name, **kwargs)
