from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms import AggregationMode, loss_weights

from .helpers import LENGTHS, cu

MODES = get_args(AggregationMode)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 6] * 6),
        ("seq-mean-token-mean", [1 / 6] * 2 + [1 / 3] + [1 / 9] * 3),
        ("seq-mean-token-sum", [1 / 3] * 6),
        ("seq-mean-token-sum-norm", [1 / 30] * 6),
    ],
)
def test_by_hand(mode: AggregationMode, expected: list[float]) -> None:
    # three sequences and an empty one
    weights = loss_weights(mode, torch.tensor([0, 2, 2, 3, 6]), norm_length=10)
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("mode", MODES)
def test_one_rollout_counts_as_one_sequence(mode: AggregationMode) -> None:
    joined = loss_weights(mode, cu((6, 2)), norm_length=8)
    pieces = loss_weights(
        mode, cu((4, 0, 2, 2, 0)), norm_length=8, rollout_ids=torch.tensor([5, 5, 5, -1, 9])
    )
    assert torch.equal(pieces, joined)
    distinct = loss_weights(
        mode, cu(LENGTHS), norm_length=8, rollout_ids=torch.arange(len(LENGTHS))
    )
    assert torch.equal(distinct, loss_weights(mode, cu(LENGTHS), norm_length=8))


def slow_weights(
    mode: AggregationMode, lengths: list[int], rollouts: list[int], norm: float
) -> list[float]:
    """By the definition, one token at a time: the tokens of each rollout count together."""
    tokens: dict[int, int] = {}
    for rollout, length in zip(rollouts, lengths):
        tokens[rollout] = tokens.get(rollout, 0) + length
    filled = sum(1 for count in tokens.values() if count)
    weight = {
        "token-mean": lambda _: 1 / sum(lengths),
        "seq-mean-token-mean": lambda rollout: 1 / filled / tokens[rollout],
        "seq-mean-token-sum": lambda _: 1 / filled,
        "seq-mean-token-sum-norm": lambda _: 1 / filled / norm,
    }[mode]
    return [weight(rollout) for rollout, length in zip(rollouts, lengths) for _ in range(length)]


sequences = st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 2)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(drawn=sequences, mode=st.sampled_from(MODES), shared=st.booleans(), norm=st.floats(0.5, 1e4))
def test_the_slow_reference(
    drawn: list[tuple[int, int]], mode: AggregationMode, shared: bool, norm: float
) -> None:
    lengths = [length for length, _ in drawn]
    rollouts = [rollout if shared else b for b, (_, rollout) in enumerate(drawn)]
    ids = torch.tensor(rollouts, dtype=torch.int64) if shared else None
    weights = loss_weights(mode, cu(lengths), norm_length=norm, rollout_ids=ids)
    expected = torch.tensor(slow_weights(mode, lengths, rollouts, norm), dtype=torch.float64)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(drawn=sequences, mode=st.sampled_from(MODES), data=st.data())
def test_a_sequence_keeps_its_weights_in_any_order(
    drawn: list[tuple[int, int]], mode: AggregationMode, data: st.DataObject
) -> None:
    lengths = [length for length, _ in drawn]
    rollouts = [rollout for _, rollout in drawn]
    order = data.draw(st.permutations(range(len(drawn))))

    def parts(chosen: list[int]) -> dict[int, list[float]]:
        ids = torch.tensor([rollouts[b] for b in chosen], dtype=torch.int64)
        sizes = [lengths[b] for b in chosen]
        weights = loss_weights(mode, cu(sizes), norm_length=8, rollout_ids=ids).split(sizes)
        return {b: part.tolist() for b, part in zip(chosen, weights)}

    assert parts(list(order)) == parts(list(range(len(drawn))))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"unknown aggregation 'token_mean'; known: .*did you mean 'token-mean'"
    ):
        loss_weights("token_mean", cu((1,)))  # type: ignore[arg-type]
    for length in (None, 0, -1, float("nan")):
        with pytest.raises(ValueError, match="norm_length: expected a number > 0"):
            loss_weights("seq-mean-token-sum-norm", cu((1,)), norm_length=length)
    with pytest.raises(ValueError, match="rollout_ids: expected shape"):
        loss_weights("token-mean", cu((1,)), rollout_ids=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        loss_weights("token-mean", torch.tensor([1, 2]))
