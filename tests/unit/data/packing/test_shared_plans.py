"""Plans of optimizer steps whose packs hold a shared prefix once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data.packing.plan import MinibatchPlan, PlanRules, plan_minibatch
from rlcore.data.packing.sharing import Beginnings, beginnings_of, share_prefixes
from rlcore.planning.shape import CostModel

COST = CostModel(1.0, 0.002)


def groups_of(
    draw: random.Random, prompts: int, n: int, prompt: int, response: int
) -> tuple[list[list[int]], list[int]]:
    """Sequences of groups, and their groups; lengths vary by half to both sides."""
    sequences: list[list[int]] = []
    for g in range(prompts):
        begin = [draw.randrange(9) for _ in range(draw.randint(prompt // 2, prompt * 3 // 2))]
        for _ in range(n):
            size = draw.randint(response // 2, response * 3 // 2)
            sequences.append([*begin, g, *(draw.randrange(9) for _ in range(size))])
    return sequences, [i // n for i in range(len(sequences))]


def alike(sequences: Sequence[list[int]], groups: list[int]) -> Beginnings:
    cu = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    tokens = torch.tensor([t for one in sequences for t in one], dtype=torch.int32)
    return beginnings_of(tokens, cu, torch.tensor(groups))


def slots(sequences: Sequence[list[int]], members: Sequence[int]) -> int:
    """The slots of a real pack of these."""
    tokens = torch.tensor([t for i in members for t in sequences[i]], dtype=torch.int32)
    lengths = torch.tensor([len(sequences[i]) for i in members], dtype=torch.int64)
    return share_prefixes(tokens, lengths).size


def load(sequences: Sequence[list[int]], rank: Sequence[Sequence[int]]) -> float:
    """The cost of a rank, each prefix once in a micro-batch, by a set of all prefixes."""
    total = 0.0
    for micro in rank:
        ends = {tuple(sequences[i][:k]) for i in micro for k in range(1, len(sequences[i]) + 1)}
        total += sum(COST(len(end)) - COST(len(end) - 1) for end in ends)
    return total


def plan(sequences: Sequence[list[int]], groups: list[int], **given: Any) -> MinibatchPlan:
    rules = PlanRules(cost=COST, **given)
    lengths = [len(one) for one in sequences]
    return plan_minibatch(rules, range(len(sequences)), lengths, alike(sequences, groups))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32), prompts=st.integers(1, 6), n=st.integers(1, 5),
    ranks=st.integers(1, 4), multiple=st.integers(1, 3), max_tokens=st.integers(8, 120),
)  # fmt: skip
def test_every_sequence_has_its_place_and_no_pack_is_too_large(
    seed: int, prompts: int, n: int, ranks: int, multiple: int, max_tokens: int
) -> None:
    sequences, groups = groups_of(random.Random(seed), prompts, n, 12, 8)
    made = plan(sequences, groups, ranks=ranks, max_tokens=max_tokens, multiple=multiple)
    placed = sorted(i for rank in range(ranks) for i in made.sequences(rank))
    assert placed == [*range(len(sequences))]
    (count,) = {len(rank) for rank in made.microbatches}
    assert count % multiple == 0
    for rank in made.microbatches:
        for micro in rank:
            assert len(micro) <= 1 or slots(sequences, micro) <= max_tokens


def test_groups_that_fit_stay_whole() -> None:
    sequences, groups = groups_of(random.Random(1), 12, 4, 30, 10)
    made = plan(sequences, groups, ranks=2, max_tokens=400)
    for rank in made.microbatches:
        for micro in rank:
            assert all([groups[i] for i in micro].count(g) == 4 for g in {groups[i] for i in micro})


def test_a_group_above_the_budget_is_cut_and_its_prefix_repeated() -> None:
    sequences = [[7] * 20 + [i] * 10 for i in range(6)]
    made = plan(sequences, [0] * 6, ranks=1, max_tokens=50)
    assert [[*micro] for micro in made.microbatches[0]] == [[0, 1, 2], [3, 4, 5]]
    assert [slots(sequences, micro) for micro in made.microbatches[0]] == [50, 50]
    assert made.shared == (20,) * 4


@pytest.mark.parametrize(
    ("prompts", "n", "ranks"), [(32, 8, 4), (8, 16, 2), (8, 16, 8), (5, 32, 4), (16, 4, 8)]
)
def test_ranks_are_as_even_as_the_best_known_split(prompts: int, n: int, ranks: int) -> None:
    """Beside whole groups, single samples, and cuts of the groups in order, whichever is best."""
    sequences, groups = groups_of(random.Random(prompts * ranks), prompts, n, 40, 20)
    budget = 10**9
    made = plan(sequences, groups, ranks=ranks, max_tokens=budget)
    ours = max(load(sequences, rank) for rank in made.microbatches)
    rules = PlanRules(ranks, budget, COST)
    lengths = [len(one) for one in sequences]
    others = [plan_minibatch(rules, range(len(sequences)), lengths).microbatches]
    order = alike(sequences, groups).order.tolist()
    for shift in range(0, len(order), max(1, n // 2)):  # in order, from somewhere on
        turned = order[shift:] + order[:shift]
        parts = np.array_split(np.array(turned), ranks)
        others.append(tuple((tuple(part.tolist()),) for part in parts))
    best = min(max(load(sequences, rank) for rank in one) for one in others)
    assert ours <= 1.02 * best
