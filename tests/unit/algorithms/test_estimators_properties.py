"""What must hold of an estimator for every batch, whatever its numbers.

Order, ids and split of groups are rules of the contract (`test_check_estimator.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algorithms import EstimatorInputs, build_estimator, segment_lengths

from .helpers import permuted, random_inputs
from .reference_estimators import CASES, case_id, reference

RICHEST = list(
    {
        name: (name, options) for name, options in sorted(CASES, key=lambda case: len(case[1]))
    }.values()
)

each_estimator = pytest.mark.parametrize(("name", "options"), RICHEST, ids=case_id)
often = settings(deadline=None, max_examples=10)
briefly = settings(deadline=None, max_examples=3)  # of each estimator


@st.composite
def batches(draw: st.DrawFn) -> EstimatorInputs:
    """Draw up to 10 sequences of up to 40 tokens in up to 4 groups; rewards often repeat."""
    lengths = draw(
        st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=10)
    )
    size = len(lengths)
    some = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-10, 10, allow_subnormal=False))
    rewards = draw(st.lists(some, min_size=size, max_size=size))
    groups = draw(st.lists(st.integers(-2, 1), min_size=size, max_size=size))
    return random_inputs(
        lengths, draw(st.integers(0, 2**16)),
        rewards=torch.tensor(rewards, dtype=torch.float64), group_ids=torch.tensor(groups, dtype=
        torch.int64),
    )  # fmt: skip


def advantages(name: str, inputs: EstimatorInputs, **options: Any) -> Tensor:
    return build_estimator(name, **options)(inputs).advantages


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@each_estimator
@briefly
@given(inputs=batches())
def test_the_reference_agrees(name: str, options: dict[str, Any], inputs: EstimatorInputs) -> None:
    result = build_estimator(name, **options)(inputs)
    expected, returns = reference(name, inputs, **options)
    # the eps of grpo makes 1e6 out of the last bit of rewards that nearly agree
    torch.testing.assert_close(result.advantages, expected, rtol=1e-9, atol=1e-8)
    if returns is not None:
        close(result.returns, returns)  # type: ignore[arg-type]


@often
@given(inputs=batches(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_vapo_with_one_lambda_is_ppo(inputs: EstimatorInputs, gamma: float, lam: float) -> None:
    common = {"gamma": gamma, "kl_coef": 0.2, "distill_coef": 0.1}
    ours = build_estimator("vapo", actor_lam=lam, critic_lam=lam, **common)(inputs)
    ppo = build_estimator("ppo", lam=lam, **common)(inputs)
    assert torch.equal(ours.advantages, ppo.advantages)
    assert torch.equal(ours.returns, ppo.returns)  # type: ignore[arg-type]


@often
@given(inputs=batches(), alpha=st.floats(0.02, 3))
def test_vapo_is_ppo_with_the_lambda_of_each_length(inputs: EstimatorInputs, alpha: float) -> None:
    whole = advantages("vapo", inputs, alpha=alpha)
    for b, length in enumerate(segment_lengths(inputs.cu_seqlens).tolist()):
        if length:
            alone, index = permuted(inputs, [b])
            lam = min(max(1 - 1 / (alpha * length), 0.0), 1.0)
            close(whole[index], advantages("ppo", alone, lam=lam))
