"""A rollout counts once, in however many segments it comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algorithms import (
    EstimatorInputs,
    InputError,
    PolicyLossInputs,
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    estimator_names,
    loss_weights,
    policy_loss_names,
    rollout_metrics,
)
from rlcore.algorithms.testing.batches import Layout, full_batch
from rlcore.algorithms.types import PER_SEQUENCE

from .helpers import cu

# Where the place of a token counts, only sums without a discount are the same: see
# test_cut_estimators.py.
UNDISCOUNTED: dict[str, dict[str, Any]] = {
    "ppo": {"lam": 1.0},
    "vapo": {"actor_lam": 1.0},
}
# A sequence of these is a segment, and clip_cov draws tokens by their place in it.
BY_SEGMENT = {"gspo", "gspo_token", "geo_mean", "clip_cov"}
LAYOUTS = st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 2)), min_size=1, max_size=12).map(
    lambda rows: Layout(tuple(n for n, _ in rows), tuple(g for _, g in rows))
)


def cut_at_random(
    batch: EstimatorInputs, generator: torch.Generator
) -> tuple[EstimatorInputs, Tensor]:
    """Cut sequences into up to three segments; also return the sequence of each segment.

    A segment may be empty, and segments of several rollouts take turns.
    """
    pieces: list[int] = []
    owners: list[int] = []
    for b, length in enumerate(batch.cu_seqlens.diff().tolist()):
        borders = torch.randint(0, length + 1, (2,), generator=generator).sort().values.tolist()
        pieces += [borders[0], borders[1] - borders[0], length - borders[1]]
        owners += [b] * 3
    rows = torch.tensor(owners, dtype=torch.int64)
    changed: dict[str, Any] = {
        name: value[rows]
        for name, value in vars(batch).items()
        if name in PER_SEQUENCE and value is not None
    }
    return replace(batch, cu_seqlens=cu(pieces), **changed), rows


def counted_once() -> EstimatorInputs:
    """A group with a right answer in three segments and a wrong one in one."""
    return EstimatorInputs(
        cu_seqlens=cu([1, 1, 1, 1]),
        rewards=torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64),
        group_ids=torch.zeros(4, dtype=torch.int64),
        rollout_ids=torch.tensor([7, 7, 7, 3]),
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.5**0.5] * 3 + [-(0.5**0.5)]),
        ("dr_grpo", [0.5] * 3 + [-0.5]),
        ("rloo", [1.0, 1.0, 1.0, -1.0]),
        ("gpg", [0.5] * 3 + [-0.5]),
        ("max_rl", [1.0, 1.0, 1.0, -1.0]),
        ("opo", [0.25] * 3 + [-0.75]),  # three tokens of four are right
        ("reinforce++_baseline", [0.5] * 3 + [-0.5]),
    ],
)
def test_statistics_of_a_group_by_hand(name: str, expected: list[float]) -> None:
    got = build_estimator(name)(counted_once()).advantages
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", estimator_names())
@settings(deadline=None, max_examples=12)
@given(layout=LAYOUTS, seed=st.integers(0, 2**31))
def test_cutting_rollouts_into_segments_changes_no_advantage(
    name: str, layout: Layout, seed: int
) -> None:
    options = dict(UNDISCOUNTED.get(name, {}))
    if "kl_coef" in estimator_keywords(name):
        options |= {"kl_coef": 0.3, "distill_coef": 0.2}
    estimator = build_estimator(name, **options)
    whole = full_batch(EstimatorInputs, layout, seed)
    segments, _ = cut_at_random(whole, torch.Generator().manual_seed(seed))
    expected = estimator(whole)
    got = estimator(segments)
    torch.testing.assert_close(got.advantages, expected.advantages, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_gae_puts_the_outcome_and_later_rewards_at_the_end_of_each_segment(name: str) -> None:
    values = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    inputs = EstimatorInputs(
        cu_seqlens=cu([2, 2]),
        rewards=torch.full((2,), 1.0, dtype=torch.float64),
        group_ids=torch.zeros(2, dtype=torch.int64),
        rollout_ids=torch.zeros(2, dtype=torch.int64),
        token_rewards=torch.tensor([0.0, 0.5, 0.0, 0.25], dtype=torch.float64),
        values=values,
    )
    options = {"gamma": 1.0} | ({"lam": 1.0} if name == "ppo" else {"actor_lam": 1.0})
    got = build_estimator(name, **options)(inputs)
    returns = torch.tensor([1.75, 1.75, 1.25, 1.25], dtype=torch.float64)
    torch.testing.assert_close(got.advantages, returns - values)
    assert got.returns is not None
    torch.testing.assert_close(got.returns, returns)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@pytest.mark.parametrize("field", ["rewards", "group_ids"])
def test_segments_that_differ_are_refused(name: str, field: str) -> None:
    inputs = counted_once()
    changed: dict[str, Any] = {
        field: torch.tensor([1, 1, 2, 0], dtype=getattr(inputs, field).dtype)
    }
    with pytest.raises(InputError, match=f"{field}: expected one value for all segments of a roll"):
        build_estimator(name)(replace(inputs, **changed))


@settings(deadline=None, max_examples=40)
@given(layout=LAYOUTS, seed=st.integers(0, 2**31))
def test_cutting_changes_no_metric(layout: Layout, seed: int) -> None:
    whole = replace(full_batch(EstimatorInputs, layout, seed), baseline_rewards=None)
    whole = replace(whole, rewards=torch.randn(whole.num_sequences, dtype=torch.float64))
    segments, rows = cut_at_random(whole, torch.Generator().manual_seed(seed))
    ends = ["stop" if b % 3 else "length" for b in range(whole.num_sequences)]
    correct = (torch.arange(whole.num_sequences) % 2).double()
    correct[2::3] = torch.nan  # no verifier was asked
    entropy = whole.logprobs
    assert entropy is not None
    shared: dict[str, Any] = {"entropy": entropy, "reward_coef": 0.1, "version": 6}
    expected = rollout_metrics(whole, finish_reasons=ends, correct=correct, **shared)
    # three segments each, of which the last one tells how the rollout ended
    cut_ends = [ends[b] if place % 3 == 2 else "turns" for place, b in enumerate(rows)]
    got = rollout_metrics(segments, finish_reasons=cut_ends, correct=correct[rows], **shared)
    assert got == pytest.approx(expected, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
@pytest.mark.parametrize("name", [n for n in policy_loss_names() if n not in BY_SEGMENT])
def test_cutting_changes_no_loss_and_no_gradient(name: str, mode: Any) -> None:
    layout = Layout((5, 1, 3, 8), (0, 0, 1, 1))
    whole = full_batch(PolicyLossInputs, layout, 3)
    ids = torch.arange(4)
    pieces = [2, 3, 1, 1, 2, 8]
    owners = torch.tensor([0, 0, 1, 2, 2, 3])
    assert whole.sequence_ids is not None
    part = replace(whole, cu_seqlens=cu(pieces), sequence_ids=whole.sequence_ids[owners])
    found = []
    for inputs, rollouts in ((whole, ids), (part, ids[owners])):
        weights = loss_weights(mode, inputs.cu_seqlens, rollout_ids=rollouts).double()
        logprobs = inputs.logprobs.clone().requires_grad_()
        step = replace(inputs, logprobs=logprobs, weights=weights)
        loss = build_policy_loss(name)
        if loss.has_batch_stats:
            step = replace(step, batch_stats=loss.batch_stats(step))
        value = (loss(step).per_token * weights).sum()
        value.backward()
        assert logprobs.grad is not None
        found.append((value.detach(), logprobs.grad))
    torch.testing.assert_close(found[1], found[0], atol=1e-9, rtol=1e-9)
