from __future__ import annotations

import math

import pytest
import torch

from rlcore.algorithms import approx_kl, kl_clamped


@pytest.mark.parametrize(
    ("d", "k1", "k2", "k3"),
    [
        (0.0, 0.0, 0.0, 0.0),
        (1.0, 1.0, 0.5, math.exp(-1.0)),
        (-1.0, -1.0, 0.5, math.e - 2.0),
        (0.5, 0.5, 0.125, math.exp(-0.5) - 0.5),
        (30.0, 20.0, 200.0, math.exp(-20.0) + 19.0),
        (-30.0, -20.0, 200.0, math.exp(20.0) - 21.0),
    ],
)
def test_table(d: float, k1: float, k2: float, k3: float) -> None:
    reference = torch.full((1,), -3.0, dtype=torch.float64)
    for kind, expected in (("k1", k1), ("k2", k2), ("k3", k3)):
        assert approx_kl(reference + d, reference, kind).item() == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]
    assert torch.equal(approx_kl(reference + d, reference), approx_kl(reference + d, reference, "k3"))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [1e4, -1e4, float("inf"), float("-inf")])
def test_value_and_gradient_are_finite(kind: str, d: float) -> None:
    logprobs = torch.tensor([d], requires_grad=True)
    kl = approx_kl(logprobs, torch.zeros(1), kind)  # type: ignore[arg-type]
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_nan_is_not_hidden() -> None:
    assert approx_kl(torch.tensor([float("nan")]), torch.zeros(1)).isnan().all()


def test_estimates_agree_on_the_expectation() -> None:
    """k1 and k3 are unbiased: weighed with the policy's own probabilities they are the KL."""
    p, q = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * approx_kl(p, q, kind)).sum(), exact)  # type: ignore[arg-type]
    assert (approx_kl(p, q, "k3") >= 0).all()


def test_k3_of_a_small_ratio_is_no_noise() -> None:
    d = torch.tensor([1e-4, -1e-4])
    torch.testing.assert_close(approx_kl(d, torch.zeros(2)), 0.5 * d.square(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradient(kind: str) -> None:
    logprobs = torch.randn(20, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(20, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: approx_kl(x, reference, kind), (logprobs,))  # type: ignore[arg-type]


def test_the_clamped_share() -> None:
    assert kl_clamped(torch.tensor([0.0, 20.0, 20.5, -21.0]), torch.zeros(4)).tolist() == [0, 0, 1, 1]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimate 'k4'; known: k1, k2, k3"):
        approx_kl(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
