from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data.packing.plan import balance, fill, split_minibatches


def longest_first(costs: list[float], bins: int) -> list[list[int]]:
    """The heuristic, word by word."""
    placed: list[list[int]] = [[] for _ in range(bins)]
    loads = [0.0] * bins
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = min(range(bins), key=lambda b: (loads[b], b))
        placed[lightest].append(item)
        loads[lightest] += costs[item]
    return placed


def test_by_hand() -> None:
    assert balance([3.0, 9.0, 4.0, 5.0, 6.0], 2) == [[1, 2], [4, 3, 0]]  # loads 13 and 14


@given(costs=st.lists(st.integers(1, 50).map(float), max_size=60), bins=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_it_is_longest_first_onto_the_lightest(costs: list[float], bins: int) -> None:
    assert balance(costs, bins) == longest_first(costs, bins)


def test_a_micro_batch_may_be_as_large_as_the_budget() -> None:
    sizes = [2, 3, 5, 1]
    assert fill(sizes, [0, 1], limit=5, bins=1) == [[1, 0]]
    assert fill(sizes, [0, 1, 2], limit=5, bins=1) == [[2], [1, 0]]
    assert fill(sizes, [0, 1, 3], limit=5, bins=1) == [[1, 0], [3]]
    assert fill(sizes, [2], limit=4, bins=2) == [[2], []], "alone it may be larger"


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=9),
    minibatches=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_optimizer_steps_take_whole_groups_however_their_rollouts_were_cut(
    groups: list[list[int]], minibatches: int, seed: int
) -> None:
    """`groups` has the segments of each rollout; the steps are even in rollouts."""
    rollouts = [(g, (g, r), size) for g, group in enumerate(groups) for r, size in enumerate(group)]
    names = {rollout: 100 - i for i, (_, rollout, _) in enumerate(rollouts)}

    def split(*, cut: bool) -> list[list[tuple[int, int]]]:
        rows = [(g, rollout) for g, rollout, size in rollouts for _ in range(size if cut else 1)]
        steps = split_minibatches(
            minibatches,
            torch.tensor([g for g, _ in rows]),
            torch.tensor([names[rollout] for _, rollout in rows]),
            seed=seed,
        )
        assert sorted(i for step in steps for i in step) == list(range(len(rows)))
        return [sorted({rows[i][1] for i in step}) for step in steps]

    whole = split(cut=False)
    assert split(cut=True) == whole
    at = {g: k for k, step in enumerate(whole) for g, _ in step}
    assert all(k == at[g] for k, step in enumerate(whole) for g, _ in step)
    sizes = [len(step) for step in whole]
    assert max(sizes) - min(sizes) <= max(len(group) for group in groups)
