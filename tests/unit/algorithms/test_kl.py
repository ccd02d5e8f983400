from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algorithms import KLKind, approx_kl, kl_clamped, loss_kl


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
        assert approx_kl(reference + d, reference, kind).item() == pytest.approx(
            expected, rel=1e-12
        )  # type: ignore[arg-type]
    assert torch.equal(
        approx_kl(reference + d, reference), approx_kl(reference + d, reference, "k3")
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [1e4, -1e4, float("inf"), float("-inf")])
def test_beyond_the_clamp_the_value_is_finite_and_the_gradient_zero(kind: str, d: float) -> None:
    logprobs = torch.tensor([d], requires_grad=True)
    kl = approx_kl(logprobs, torch.zeros(1), kind)  # type: ignore[arg-type]
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0]


def test_nan_is_not_hidden() -> None:
    assert approx_kl(torch.tensor([float("nan")]), torch.zeros(1)).isnan().all()


def test_estimates_agree_on_the_expectation() -> None:
    """k1 and k3 are unbiased: weighed with the policy's own probabilities they are the KL."""
    p, q = torch.randn(
        2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * approx_kl(p, q, kind)).sum(), exact)  # type: ignore[arg-type]
    assert (approx_kl(p, q, "k3") >= 0).all()


def test_k3_of_a_small_ratio_is_no_noise() -> None:
    d = torch.tensor([1e-4, -1e-4])
    torch.testing.assert_close(approx_kl(d, torch.zeros(2)), 0.5 * d.square(), rtol=1e-2, atol=0)


def test_the_clamped_share() -> None:
    assert kl_clamped(torch.tensor([0.0, 20.0, 20.5, -21.0]), torch.zeros(4)).tolist() == [
        0,
        0,
        1,
        1,
    ]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimate 'k4'; known: k1, k2, k3"):
        approx_kl(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


# The KL term of a loss: over a vocabulary of seven every expectation is a sum.

KINDS = get_args(KLKind)


def policies(seed: int = 0, vocabulary: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits with grad, and the distant log-probs of a reference and an old policy."""
    logits, reference, old = torch.randn(
        3, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (
        (1.5 * logits).requires_grad_(),
        (1.5 * reference).log_softmax(-1),
        (1.5 * old).log_softmax(-1),
    )


def gradient(logits: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient in the logits of a function of the policy's log-probs."""
    return torch.autograd.grad(value(logits.log_softmax(-1)), logits)[0]


def exact_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_value_of_k1_and_k3_is_the_kl(kind: KLKind) -> None:
    logits, reference, old = policies()
    p = logits.detach().log_softmax(-1)
    value = (old.exp() * loss_kl(p, reference, kind, old_logprobs=old)).sum()
    torch.testing.assert_close(value, exact_kl(p, reference))


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.lists(st.tuples(*[st.floats(-4, 4)] * 3), min_size=1, max_size=6),
)
def test_for_any_three_policies(kind: KLKind, rows: list[tuple[float, float, float]]) -> None:
    logits, reference, old = torch.tensor(rows, dtype=torch.float64).T
    logits = logits.clone().requires_grad_()
    reference = reference.log_softmax(-1)
    old = old.log_softmax(-1)
    found = gradient(
        logits, lambda p: (old.exp() * loss_kl(p, reference, kind, old_logprobs=old)).sum()
    )
    torch.testing.assert_close(
        found, gradient(logits, lambda p: exact_kl(p, reference)), rtol=1e-8, atol=1e-10
    )


def test_the_plain_terms_have_other_gradients() -> None:
    """On policy k1 has no gradient, k2 that of the KL, k3 that of the reverse KL."""
    logits, reference, _ = policies()
    own = logits.detach().log_softmax(-1)
    found = {
        kind: gradient(logits, lambda p, kind=kind: (own.exp() * loss_kl(p, reference, kind)).sum())
        for kind in KINDS
    }
    forward = gradient(logits, lambda p: exact_kl(p, reference))
    reverse = gradient(logits, lambda p: exact_kl(reference, p))
    torch.testing.assert_close(found["k1"], torch.zeros_like(forward))
    torch.testing.assert_close(found["k2"], forward)
    torch.testing.assert_close(found["k3"], reverse)
    assert not torch.allclose(forward, reverse, rtol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_without_old_logprobs_it_is_the_estimate(kind: KLKind) -> None:
    logits, reference, _ = policies()
    p = logits.detach().log_softmax(-1)
    assert torch.equal(loss_kl(p, reference, kind), approx_kl(p, reference, kind))
    assert torch.equal(
        loss_kl(p, reference, kind, old_logprobs=p), approx_kl(p, reference, kind)
    ), "a ratio of 1"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [1e4, -1e4, 21.0, float("inf"), float("-inf")])
@pytest.mark.parametrize("r", [1e4, -1e4, 0.0])
def test_the_weighted_term_is_finite_in_float32(kind: KLKind, d: float, r: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    value = loss_kl(logprobs, logprobs.detach() - d, kind, old_logprobs=logprobs.detach() - r)
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.isfinite().all()
    assert slope.isfinite().all()
    bounded = torch.tensor(max(-20.0, min(20.0, r))).exp() * approx_kl(
        logprobs.detach(), logprobs.detach() - d, kind
    )
    torch.testing.assert_close(value.detach(), bounded)
