from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms import (
    PolicyLoss,
    PolicyLossInputs,
    build_policy_loss,
    value_clipped,
    value_loss,
)


def policy_loss(
    ratios: list[float], advantages: list[float], name: str = "ppo_clip", **kwargs: object
) -> PolicyLoss:
    logprobs = torch.tensor(ratios, dtype=torch.float64).log()
    return build_policy_loss(name, **kwargs)(PolicyLossInputs(
        cu_seqlens=torch.tensor([0, len(ratios)]), logprobs=logprobs, old_logprobs=torch.zeros_like(
        logprobs),
        advantages=torch.tensor(advantages, dtype=torch.float64),
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "advantage", "kwargs", "expected"),
    [
        (1.1, 2.0, {}, -2.2),
        (1.5, 2.0, {}, -2.4),  # clipped high
        (1.25, 2.0, {"clip_high": 0.28}, -2.5),  # clip-higher lets it through
        (1.5, 2.0, {"clip_high": 0.28}, -2.56),
        (0.5, 2.0, {}, -1.0),  # low ratio with a positive advantage is not clipped
        (0.5, -2.0, {}, 1.6),  # clipped low
        (0.85, -2.0, {"clip_low": 0.1}, 1.8),
        (1.5, -2.0, {}, 3.0),  # high ratio with a negative advantage is not clipped
        (5.0, -2.0, {}, 10.0),
        (5.0, -2.0, {"dual_clip": 3.0}, 6.0),
        (2.0, -2.0, {"dual_clip": 3.0}, 4.0),
        (5.0, 2.0, {"dual_clip": 3.0}, -2.4),  # dual clip leaves positive advantages alone
        (1.0, 0.0, {}, 0.0),
    ],
)
def test_ppo_clip_table(
    ratio: float, advantage: float, kwargs: dict[str, float], expected: float
) -> None:
    assert policy_loss([ratio], [advantage], **kwargs).per_token.item() == pytest.approx(
        expected, abs=1e-12
    )


def test_ppo_clip_metrics_by_hand() -> None:
    metrics = policy_loss(
        [1.5, 0.5, 1.5, 1.0, 5.0], [1.0, -1.0, -1.0, 1.0, -1.0], dual_clip=3.0
    ).metrics
    assert metrics["clipfrac"].tolist() == [1, 1, 0, 0, 0]
    assert metrics["clipfrac_high"].tolist() == [1, 0, 0, 0, 0]
    assert metrics["clipfrac_low"].tolist() == [0, 1, 0, 0, 0]
    assert metrics["dual_clipfrac"].tolist() == [0, 0, 0, 0, 1]
    torch.testing.assert_close(
        metrics["ratio"], torch.tensor([1.5, 0.5, 1.5, 1.0, 5.0], dtype=torch.float64)
    )
    assert metrics["approxkl"][0].item() == pytest.approx(0.5 * math.log(1.5) ** 2)
    assert "dual_clipfrac" not in policy_loss([1.0], [1.0]).metrics
    assert "entropy" not in policy_loss([1.0], [1.0]).metrics


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "clipped"),
    [
        (1.0, 0.0, 3.0, None, 2.0, 0),
        (1.0, 0.0, 3.0, 0.5, 0.5 * 2.5**2, 1),  # moved towards the target further than allowed
        (0.2, 0.0, 3.0, 0.5, 0.5 * 2.8**2, 0),  # inside
        (-1.0, 0.0, 3.0, 0.5, 8.0, 0),  # moved away: the plain error is the larger
    ],
)
def test_value_loss_table(
    value: float, old: float, target: float, clip: float | None, expected: float, clipped: int
) -> None:
    v, o, r = (torch.tensor([x], dtype=torch.float64) for x in (value, old, target))
    assert value_loss(v, o, r, clip=clip).item() == pytest.approx(expected)
    assert value_clipped(v, o, r, clip=clip).item() == clipped
    assert clip or value_loss(v, None, r).item() == pytest.approx(expected)


def slow_value_loss(
    value: float, old: float, target: float, clip: float | None
) -> tuple[float, float]:
    """Half the larger squared error, and its slope in the value."""
    plain = (value - target) ** 2
    if clip is None:
        return 0.5 * plain, value - target
    bounded = min(max(value, old - clip), old + clip)
    if (bounded - target) ** 2 > plain:
        return 0.5 * (bounded - target) ** 2, 0.0
    return 0.5 * plain, value - target


number = st.floats(-100, 100, width=32)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(number, number, number), max_size=6),
    clip=st.none() | st.floats(0.01, 50),
)
def test_value_loss_against_the_slow_reference(
    rows: list[tuple[float, ...]], clip: float | None
) -> None:
    values, old, returns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).T
    values = values.clone().requires_grad_()
    loss = value_loss(values, old, returns, clip=clip)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    expected = (
        torch.tensor([slow_value_loss(*row, clip) for row in rows], dtype=torch.float64)
        .reshape(-1, 2)
        .T
    )
    torch.testing.assert_close(loss.detach(), expected[0])
    torch.testing.assert_close(gradient, expected[1])


def test_value_loss_names_what_is_wrong() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="returns: expected the shape of values"):
        value_loss(x, x, torch.zeros(1))
    with pytest.raises(ValueError, match="clip: expected a number > 0"):
        value_loss(x, x, x, clip=0.0)
    with pytest.raises(ValueError, match="old_values: expected a tensor"):
        value_loss(x, None, x, clip=0.2)
