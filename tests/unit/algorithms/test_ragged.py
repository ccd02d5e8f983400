from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algorithms import (
    discounted_suffix_sum,
    group_count,
    group_mean_std,
    last_token_index,
    segment_index,
    segment_mean,
    segment_sum,
)
from rlcore.algorithms.normalization import whiten
from rlcore.algorithms.ragged import PIECE, add_, mean_and_variance, pieces
from rlcore.algorithms.scan import discounted_suffix_sum_

from .helpers import LENGTHS, cu


def slow_suffix_sum(x: Tensor, borders: Tensor, decay: float | Tensor) -> Tensor:
    y = torch.zeros_like(x)
    decays = torch.as_tensor(decay, dtype=torch.float64).expand(len(borders) - 1).tolist()
    for (start, end), rate in zip(itertools.pairwise(borders.tolist()), decays):
        running = 0.0
        for t in range(end - 1, start - 1, -1):
            running = float(x[t]) + rate * running
            y[t] = running
    return y


@pytest.mark.parametrize(
    "lengths", [LENGTHS, (0, 0), (), (1, 1, 1), (3, 2, 3), (2500,), (0, 1100, 1, 1030, 0)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_suffix_sum_is_the_recursion(
    lengths: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), generator=generator, dtype=dtype)
    each = 1 - torch.rand(len(lengths), generator=generator, dtype=torch.float64) ** 8
    each[::4] = 1.0
    each[1::4] = 0.0
    for decay in (0.0, 1e-3, 0.5, 0.95, 0.9999, 1.0, each):
        y = discounted_suffix_sum(x, cu(lengths), decay)
        assert y.dtype == dtype
        expected = slow_suffix_sum(x.double(), cu(lengths), decay)
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 10)


def test_suffix_sum_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    expected = torch.tensor([1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4.0, 8 + 0.5 * 16, 16.0])
    assert torch.equal(discounted_suffix_sum(x, torch.tensor([0, 3, 3, 5]), 0.5), expected)


@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 1e300])
@pytest.mark.parametrize("lengths", [(40, 70, 35), (3, 2, 3), (400, 300, 500)])
def test_suffix_sum_keeps_a_bad_sequence_to_itself(lengths: tuple[int, ...], poison: float) -> None:
    x = torch.randn(sum(lengths), dtype=torch.float64)
    clean = discounted_suffix_sum(x, cu(lengths), 0.9)
    start = lengths[0]
    end = lengths[0] + lengths[1]
    x[start:end] = poison
    y = discounted_suffix_sum(x, cu(lengths), 0.9)
    assert torch.equal(y[:start], clean[:start])
    assert torch.equal(y[end:], clean[end:])


def test_suffix_sum_has_a_gradient() -> None:
    x = torch.randn(80, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: discounted_suffix_sum(x, cu((40, 0, 37, 1, 2)), 0.9), (x,)
    )


def test_suffix_sum_leaves_its_input_alone() -> None:
    x = torch.randn(5)
    for decay in (0.0, 0.5):
        y = discounted_suffix_sum(x, cu((5,)), decay)
        assert x._version == 0
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("decay", [-0.1, 1.01, float("nan")])
def test_suffix_sum_refuses_a_decay_outside_the_unit_interval(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        discounted_suffix_sum(torch.ones(2), cu((2,)), decay)


@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 3), st.integers(28, 36), st.integers(60, 70), st.just(64)),
        max_size=12,
    ),
    decay=st.sampled_from([0.5, 0.95, 1.0]),
    each=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_suffix_sum_wherever_sequences_end_in_a_row_of_the_scan(
    lengths: list[int], decay: float, each: bool
) -> None:
    x = torch.randn(
        sum(lengths), generator=torch.Generator().manual_seed(len(lengths)), dtype=torch.float64
    )
    rate = torch.full((len(lengths),), decay, dtype=torch.float64) if each else decay
    expected = slow_suffix_sum(x, cu(lengths), decay)
    torch.testing.assert_close(
        discounted_suffix_sum(x, cu(lengths), rate), expected, rtol=1e-12, atol=1e-11
    )


@pytest.mark.parametrize("each", [False, True])
def test_suffix_sum_of_a_million_rewards_is_right_to_the_rounding_of_the_input(each: bool) -> None:
    noise = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (1e4 + 1e-2 * noise).float()
    borders = torch.tensor([0, 1_000_000])
    y = discounted_suffix_sum(x, borders, torch.ones(1) if each else 1.0)
    expected = x.double().flip(0).cumsum(0).flip(0)
    # half a unit in the last place
    torch.testing.assert_close(y.double(), expected, rtol=2**-24, atol=0)


def test_a_decay_for_each_sequence_keeps_a_bad_sequence_to_itself_and_has_a_gradient() -> None:
    x = torch.randn(145, dtype=torch.float64, requires_grad=True)
    decay = torch.tensor([0.9, 1.0, 0.3], dtype=torch.float64)
    borders = cu((40, 70, 35))
    assert torch.autograd.gradcheck(lambda x: discounted_suffix_sum(x, borders, decay), (x,))
    clean = discounted_suffix_sum(x, borders, decay)
    poisoned = x.detach().index_fill(0, torch.arange(40, 110), float("inf"))
    y = discounted_suffix_sum(poisoned, borders, decay)
    assert torch.equal(y[:40], clean[:40])
    assert torch.equal(y[110:], clean[110:])


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        (torch.tensor([0.5]), r"\[B\] = \[2\].*got torch.float32 \[1\]"),
        (torch.tensor([1, 0]), "got torch.int64"),
        (torch.tensor([0.5, 1.01]), "got 1.0.* for sequence 1"),
        (torch.tensor([float("nan"), 0.0]), "got nan for sequence 0"),
    ],
)
def test_suffix_sum_refuses_a_wrong_decay_for_each_sequence(decay: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"decay: .*{message}"):
        discounted_suffix_sum(torch.ones(2), cu((1, 1)), decay)


def test_segments_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 10.0])
    borders = torch.tensor([0, 0, 3, 3, 4])
    assert segment_sum(x, borders).tolist() == [0, 6, 0, 10]
    assert segment_mean(x, borders).tolist() == [0, 2, 0, 10]
    assert segment_index(borders).tolist() == [1, 1, 1, 3]
    assert last_token_index(borders).tolist() == [2, 3]


def test_segments_of_nothing() -> None:
    empty = torch.zeros(0)
    assert segment_sum(empty, torch.tensor([0])).shape == (0,)
    assert segment_mean(empty, torch.tensor([0, 0, 0])).tolist() == [0, 0]
    assert segment_index(torch.tensor([0, 0])).shape == (0,)


def test_segment_mean_has_a_gradient() -> None:
    x = torch.randn(sum(LENGTHS), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_mean(x, cu(LENGTHS)), (x,))


def test_whiten_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])  # mean 2, unbiased variance 1
    torch.testing.assert_close(whiten(x), torch.tensor([-1.0, 0.0, 1.0]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        whiten(x, shift_mean=False), torch.tensor([1.0, 2.0, 3.0]), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(whiten(x, eps=3.0), torch.tensor([-0.5, 0.0, 0.5]))


def test_whiten_survives_a_mean_far_above_the_std() -> None:
    x = 50 + 1e-3 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    wide = x.double()
    expected = (wide - wide.mean()) * torch.rsqrt(wide.var() + 1e-8)
    torch.testing.assert_close(whiten(x).double(), expected, rtol=1e-6, atol=1e-6)
    assert abs(float(whiten(x).double().mean())) < 1e-6


def test_whiten_of_nothing_of_one_and_of_equals() -> None:
    assert whiten(torch.zeros(0)).shape == (0,)
    assert whiten(torch.tensor([7.0])).tolist() == [0.0]
    assert whiten(torch.tensor([7.0]), shift_mean=False).tolist() == [7.0]
    assert whiten(torch.full((100,), 0.1)).abs().max() < 1e-6


def test_groups_are_by_id() -> None:
    x = torch.tensor([1.0, 5.0, 3.0, 7.0, 4.0])
    groups = torch.tensor([9, -4, 9, 123456789012, 9])
    mean, std = group_mean_std(x, groups)
    triple = torch.tensor([1.0, 3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(mean[[0, 2, 4]], triple.mean().expand(3))
    torch.testing.assert_close(std[[0, 2, 4]], triple.std().expand(3))
    assert mean[[1, 3]].tolist() == [5, 7]
    assert std[[1, 3]].tolist() == [0, 0]
    assert group_count(groups).tolist() == [3, 1, 3, 1, 3]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_a_group_of_equals_has_exactly_no_spread(value: float) -> None:
    x = torch.full((7,), value)
    mean, std = group_mean_std(x, torch.zeros(7, dtype=torch.int64))
    assert torch.equal(mean, x.double())
    assert std.eq(0).all()


def test_group_std_survives_a_mean_far_above_it() -> None:
    x = 50 + 1e-3 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    _, std = group_mean_std(x, torch.zeros(64, dtype=torch.int64))
    torch.testing.assert_close(std[0], x.double().std())


# --- float64 arithmetic a piece at a time ---------------------------------------------------------


LONG = 2 * PIECE + 5


def test_pieces_cover_each_token_once() -> None:
    x = torch.arange(LONG)
    parts = list(pieces(x, x + 1))
    assert [len(a) for a, _ in parts] == [PIECE, PIECE, 5]
    assert torch.equal(torch.cat([a for a, _ in parts]), x)
    assert all(torch.equal(a + 1, b) for a, b in parts)
    assert [len(a) for (a,) in pieces(torch.zeros(0))] == [0]


@pytest.mark.parametrize("size", [0, 7, LONG])
def test_add_in_place(size: int) -> None:
    wide = torch.ones(size, dtype=torch.float64)
    x = torch.arange(size).float()
    assert add_(wide, x, -0.5) is wide
    assert torch.equal(wide, 1 - 0.5 * x.double())


@pytest.mark.parametrize("size", [2, 1000, LONG])
def test_mean_and_variance_far_from_zero(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (1e4 + 1e-2 * torch.randn(size, generator=generator)).float()
    minus = torch.randn(size, generator=generator)
    for found, wide in (
        (mean_and_variance(x), x.double()),
        (mean_and_variance(x, minus), x.double() - minus.double()),
    ):
        torch.testing.assert_close(found[0], wide.mean(), rtol=1e-14, atol=0)
        torch.testing.assert_close(found[1], wide.var(), rtol=1e-9, atol=0)
    assert float(mean_and_variance(x[:1])[1]) == 0


def test_whitening_is_the_same_in_one_piece_and_in_many() -> None:
    x = torch.randn(LONG, generator=torch.Generator().manual_seed(1))
    wide = x.double()
    torch.testing.assert_close(
        whiten(x).double(),
        (wide - wide.mean()) * torch.rsqrt(wide.var() + 1e-8),
        rtol=1e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(4),
        torch.ones(8, dtype=torch.float64)[::2],
        torch.ones(4, dtype=torch.float64, requires_grad=True),
    ],
)
def test_the_suffix_sum_in_place_wants_a_vector_of_its_own(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected a contiguous float64 tensor without gradient"):
        discounted_suffix_sum_(x, torch.tensor([0, 4]), 0.5)
