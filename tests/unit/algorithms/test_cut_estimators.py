"""What estimators make of a rollout that comes in segments, against Python floats.

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

from rlcore.algorithms import EstimatorInputs, build_estimator
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
LAYOUTS = st.lists(st.integers(0, 7), min_size=1, max_size=5).map(
    lambda lengths: Layout(tuple(lengths), (0,) * len(lengths))
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
@given(layout=LAYOUTS, seed=st.integers(0, 2**31))
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
@given(
    layout=LAYOUTS,
    seed=st.integers(0, 2**31),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
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
@given(layout=LAYOUTS, groups=st.integers(1, 3), seed=st.integers(0, 2**31))
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
