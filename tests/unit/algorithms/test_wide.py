from __future__ import annotations

import pytest
import torch

from rlcore.algorithms.ragged import PIECE, add_, mean_and_variance, pieces, whiten
from rlcore.algorithms.scan import discounted_suffix_sum_

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
