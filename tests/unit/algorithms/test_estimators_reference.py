"""Every estimator against its slow reference, on ragged batches and on those with tool gaps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcore.algorithms import EstimatorInputs, build_estimator, estimator_names

from .helpers import LENGTHS, cu, random_inputs
from .reference_estimators import CASES, REFERENCES, case_id, episodes, reference

each_case = pytest.mark.parametrize(("name", "options"), CASES, ids=case_id)


def agree(name: str, inputs: EstimatorInputs, options: dict[str, Any]) -> None:
    result = build_estimator(name, **options)(inputs)
    advantages, returns = reference(name, inputs, **options)
    torch.testing.assert_close(result.advantages, advantages, rtol=1e-12, atol=1e-12)
    if returns is None:
        assert result.returns is None
    else:
        torch.testing.assert_close(result.returns, returns, rtol=1e-12, atol=1e-12)


def test_every_estimator_of_ours_has_a_reference() -> None:
    assert set(REFERENCES) == {name for name, _ in CASES} == set(estimator_names())


@each_case
@pytest.mark.parametrize("seed", range(2))
def test_ragged_batches(name: str, options: dict[str, Any], seed: int) -> None:
    lengths = torch.randint(0, 9, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
    # empty, one token, longer than a block of the scan
    agree(name, random_inputs(seed=seed), options)
    agree(name, random_inputs(lengths, seed), options)
    agree(name, random_inputs(lengths, seed, token_rewards=None), options)


@each_case
def test_degenerate_batches(name: str, options: dict[str, Any]) -> None:
    """Rewards of 0 and 1, groups of one, equal rewards, huge and negative ids."""
    for seed in range(4):
        inputs = random_inputs([1, 3, 0, 2, 2, 5, 1, 4, 2, 3], seed, token_rewards=None)
        agree(name, replace(inputs, rewards=(inputs.rewards > 0).double()), options)
    agree(name, random_inputs(group_ids=torch.randperm(len(LENGTHS)) - 4), options)
    for value in (0.0, 0.1, -3.0):
        equal = torch.full((len(LENGTHS),), value, dtype=torch.float64)
        parts = equal[:, None].expand(-1, 3)
        agree(name, random_inputs(rewards=equal, reward_parts=parts), options)
    ids = torch.tensor([2**62, -(2**62), 2**62, 0, -1, 2**62, -(2**62), -1, 0])
    agree(name, random_inputs(group_ids=ids), options)


def with_gaps(seed: int) -> tuple[EstimatorInputs, list[list[bool]], dict[str, list[list[float]]]]:
    """Return samples like [a a obs obs a a]: the batch of trainable tokens, masks, all numbers."""
    masks = [
        [True, True, False, False, True, True],
        [True, False, True, False, False, True, False],  # ends in an observation
        [False, False, True],
        [False, False],
        [True],
    ]
    generator = torch.Generator().manual_seed(seed)
    full = {
        name: [
            torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist()
            for mask in masks
        ]
        for name in (
            *("token_rewards", "kl", "values", "logprobs", "teacher_logprobs", "ref_logprobs"),
        )
    }
    kept = {
        name: torch.tensor(
            [x for row, mask in zip(rows, masks) for x, on in zip(row, mask) if on],
            dtype=torch.float64,
        )
        for name, rows in full.items()
    }
    rewards, baselines = torch.randn(2, len(masks), generator=generator, dtype=torch.float64)
    inputs = EstimatorInputs(
        cu_seqlens=cu([sum(mask) for mask in masks]), rewards=rewards, baseline_rewards=baselines,
        group_ids=torch.tensor([5, 1, 5, 1, 5]),
        reward_parts=torch.stack([rewards, baselines, rewards * baselines], 1), **kept,
    )  # fmt: skip
    return inputs, masks, full


def masked_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> list[float]:
    """GAE on the whole sample: an observation passes on the value and the advantage behind it."""
    advantages = []
    value = 0.0
    advantage = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            advantage = rewards[t] + gamma * value - values[t] + gamma * lam * advantage
            value = values[t]
            advantages.append(advantage)
    return advantages[::-1]


@pytest.mark.parametrize(
    ("name", "options", "gamma", "lam"),
    [
        ("ppo", {"gamma": 0.9, "lam": 0.95}, 0.9, 0.95), ("vapo", {"gamma": 0.9, "actor_lam": 0.5},
         0.9, 0.5),
        ("reinforce++", {"gamma": 0.9}, 0.9, 1.0), ("remax", {}, 1.0, 1.0),
    ],
    ids=case_id,
)  # fmt: skip
def test_gaps_for_tools_are_no_steps_in_time(
    name: str, options: dict[str, Any], gamma: float, lam: float
) -> None:
    inputs, masks, full = with_gaps(seed=3)
    result = build_estimator(name, kl_coef=0.2, distill_coef=0.4, **options)(inputs)
    expected: list[float] = []
    for b, mask in enumerate(masks):
        r = [
            x - 0.2 * kl + 0.4 * (teacher - own)
            for x, kl, teacher, own in zip(
                *(full[f][b] for f in ("token_rewards", "kl", "teacher_logprobs", "logprobs"))
            )
        ]
        if any(mask):
            # the last *trainable* token
            r[max(t for t, on in enumerate(mask) if on)] += float(inputs.rewards[b])
        values = full["values"][b] if name in ("ppo", "vapo") else [0.0] * len(mask)
        baseline = float(inputs.baseline_rewards[b]) if name == "remax" else 0.0  # type: ignore[index]
        expected += [a - baseline for a in masked_gae(r, values, mask, gamma, lam)]
    torch.testing.assert_close(result.advantages, torch.tensor(expected, dtype=torch.float64))


@each_case
def test_gaps_for_tools_against_the_reference(name: str, options: dict[str, Any]) -> None:
    inputs, masks, _ = with_gaps(seed=4)
    assert [episode.length for episode in episodes(inputs)] == [sum(mask) for mask in masks]
    agree(name, inputs, options)
