"""A rollout counts once, in however many segments it comes.

Of GAE: the outcome stands at the end of each segment, together with what the tokens of later
segments earn. So behind a seam a segment sees B = R + all later rewards where the rollout in one
piece sees what its critic and its later tokens tell, gamma * (V + lambda * A) of the token behind
the seam. Without a discount the two are equal: values telescope, whatever they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
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
from rlcore.algorithms.testing.batches import Layout, full_batch, take

from .helpers import cu
from .reference_estimators import REFERENCES, Episode, episodes

SHAPED = {"kl_coef": 0.3, "distill_coef": 0.2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("ppo", {"gamma": 0.9, "lam": 0.8}),
    ("ppo", {"gamma": 0.0, "lam": 0.5}),
    ("vapo", {}),  # its lambda goes by the length of the segment
    ("vapo", {"gamma": 0.9, "critic_lam": 0.7, "alpha": 0.5}),
    ("vapo", {"gamma": 0.9, "actor_lam": 0.6}),
    ("reinforce++", {"gamma": 0.9}),
    ("remax", {}),
]
ONE_GROUP = st.lists(st.integers(0, 7), min_size=1, max_size=5).map(
    lambda lengths: Layout(tuple(lengths), (0,) * len(lengths))
)
LAYOUTS = st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 2)), min_size=1, max_size=12).map(
    lambda rows: Layout(tuple(n for n, _ in rows), tuple(g for _, g in rows))
)


@dataclass(frozen=True)
class Cut:
    """A batch of rollouts in segments, which stand between those of other rollouts."""

    whole: EstimatorInputs
    segments: EstimatorInputs
    tokens: Tensor  # int64 [M], where each token of `segments` stands in `whole`
    spans: list[tuple[int, int, int]]  # of each segment: its rollout, and its tokens [start, end)


def cut(layout: Layout, seed: int) -> Cut:
    """Into up to three segments a rollout, of which some have no token."""
    generator = torch.Generator().manual_seed(seed)
    whole = full_batch(EstimatorInputs, layout, seed)
    rewards = torch.randn(whole.num_sequences, generator=generator, dtype=torch.float64)
    whole = replace(whole, rewards=rewards)
    spans: list[tuple[int, int, int]] = []
    for b, length in enumerate(layout.lengths):
        first, second = torch.randint(0, length + 1, (2,), generator=generator).sort().values
        borders = [0, int(first), int(second), length]
        spans += [(b, start, end) for start, end in pairwise(borders)]
    rows = torch.tensor([b for b, _, _ in spans])
    pieces = EstimatorInputs(**{
        **vars(whole),
        "cu_seqlens": cu([end - start for _, start, end in spans]),
        **{
            name: getattr(whole, name)[rows]
            for name in ("rewards", "group_ids", "rollout_ids", "baseline_rewards", "reward_parts")
        },
    })  # fmt: skip
    # any mixture of the rollouts, each in order
    waiting: dict[int, list[int]] = {}
    for row, (b, _, _) in enumerate(spans):
        waiting.setdefault(b, []).append(row)
    mixed = rows[torch.randperm(len(rows), generator=generator)].tolist()
    order = [waiting[b].pop(0) for b in mixed]
    segments, tokens = take(pieces, order)
    return Cut(whole, segments, tokens, [spans[row] for row in order])


def rewarded(made: Cut, kl_coef: float, distill_coef: float) -> list[Episode]:
    """The segments as sequences of their own, each with B for its outcome."""
    singles = episodes(made.segments)
    owners = [b for b, _, _ in made.spans]
    earned = [math.fsum(episode.token_terms(kl_coef, distill_coef)) for episode in singles]
    return [
        replace(
            episode,
            reward=episode.reward
            + math.fsum(x for b, x in zip(owners[k + 1 :], earned[k + 1 :]) if b == owners[k]),
        )
        for k, episode in enumerate(singles)
    ]


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(deadline=None, max_examples=20)
@given(layout=ONE_GROUP, seed=st.integers(0, 2**31))
def test_a_segment_is_a_sequence_that_ends_in_the_outcome_and_all_that_follows(
    name: str, options: dict[str, Any], layout: Layout, seed: int
) -> None:
    made = cut(layout, seed)
    got = build_estimator(name, **options, **SHAPED)(made.segments)
    rows = REFERENCES[name](rewarded(made, **SHAPED), **options, **SHAPED)
    for vector, column in ((got.advantages, 0), (got.returns, 1)):
        expected = [x for row in rows for x in row[column] or ()]
        assert vector is not None
        assert vector.tolist() == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("name", ["ppo", "vapo"])
@settings(deadline=None, max_examples=20)
@given(layout=ONE_GROUP, seed=st.integers(0, 2**31), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_a_cut_moves_advantages_by_what_stands_behind_the_seam(
    name: str, layout: Layout, seed: int, gamma: float, lam: float
) -> None:
    """(gamma lam)^(tokens up to the seam) * (B - gamma * (V + lam * A)); nothing in the last."""
    made = cut(layout, seed)
    options = {"gamma": gamma, "lam" if name == "ppo" else "actor_lam": lam}
    estimator = build_estimator(name, **options, **SHAPED)
    whole = estimator(made.whole).advantages
    moved = (estimator(made.segments).advantages - whole[made.tokens]).tolist()
    starts = made.whole.cu_seqlens.tolist()
    rollouts = episodes(made.whole)
    expected = []
    for b, start, end in made.spans:
        rollout = rollouts[b]
        seam = 0.0
        if end < rollout.length:
            later = math.fsum(rollout.token_terms(**SHAPED)[end:])
            behind = rollout.tokens["values"][end] + lam * float(whole[starts[b] + end])
            seam = rollout.reward + later - gamma * behind
        expected += [(gamma * lam) ** (end - 1 - t) * seam for t in range(start, end)]
    assert moved == pytest.approx(expected, abs=1e-10)


@settings(deadline=None, max_examples=40)
@given(layout=ONE_GROUP, groups=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_parts_of_the_reward_credit_a_cut_rollout_as_a_whole_one(
    layout: Layout, groups: int, seed: int
) -> None:
    """`gdpo`, where some parts gave some rollouts no score."""
    size = len(layout.lengths)
    made = cut(Layout(layout.lengths, tuple(b % groups for b in range(size))), seed)
    generator = torch.Generator().manual_seed(seed)
    assert made.whole.reward_parts is not None
    silent = torch.rand(made.whole.reward_parts.shape, generator=generator) < 0.2
    parts = made.whole.reward_parts.nan_to_num().masked_fill(silent, math.nan)
    rows = torch.tensor([b for b, _, _ in made.spans])
    options = {"reward_weights": [1.0, 0.25, 2.0]}
    whole = REFERENCES["gdpo"](episodes(replace(made.whole, reward_parts=parts)), **options)
    expected = torch.tensor([x for row, _ in whole for x in row], dtype=torch.float64)
    got = build_estimator("gdpo", **options)(replace(made.segments, reward_parts=parts[rows]))
    torch.testing.assert_close(got.advantages, expected[made.tokens], atol=1e-9, rtol=1e-9)


# --- statistics, metrics and losses ---------------------------------------------------------------

# Where the position of a token counts, only sums without a discount are the same.
UNDISCOUNTED: dict[str, dict[str, Any]] = {"ppo": {"lam": 1.0}, "vapo": {"actor_lam": 1.0}}
# A sequence of these is a segment, and clip_cov draws tokens by their place in it.
BY_SEGMENT = {"gspo", "gspo_token", "geo_mean", "clip_cov"}


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
    made = cut(layout, seed)
    expected = estimator(made.whole).advantages[made.tokens]
    got = estimator(made.segments).advantages
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


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
    made = cut(layout, seed)
    whole = replace(made.whole, baseline_rewards=None)
    segments = replace(made.segments, baseline_rewards=None)
    rows = [b for b, _, _ in made.spans]
    ends = ["stop" if b % 3 else "length" for b in range(whole.num_sequences)]
    correct = (torch.arange(whole.num_sequences) % 2).double()
    correct[2::3] = torch.nan  # no verifier was asked
    shared: dict[str, Any] = {"reward_coef": 0.1, "version": 6}
    expected = rollout_metrics(
        whole, finish_reasons=ends, correct=correct, entropy=whole.logprobs, **shared
    )
    # The last segment says how the rollout ended.
    cut_ends = ["turns" if b in rows[k + 1 :] else ends[b] for k, b in enumerate(rows)]
    got = rollout_metrics(
        segments,
        finish_reasons=cut_ends,
        correct=correct[rows],
        entropy=segments.logprobs,
        **shared,
    )
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
