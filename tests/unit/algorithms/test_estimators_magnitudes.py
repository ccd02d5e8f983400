"""Numbers far from 1, and sequences of a million tokens: right to the rounding of the input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.signal import lfilter
from torch import Tensor

from rlcore.algorithms import EstimatorInputs, OutputError, build_estimator
from rlcore.config.built_in import ESTIMATORS

from .helpers import cu, in_float32, random_inputs
from .reference_estimators import CASES, case_id, reference

each_case = pytest.mark.parametrize(("name", "options"), CASES, ids=case_id)

LENGTHS = [1, 3, 2, 5, 1, 4, 2, 2, 3, 1, 40, 7]
GROUPS = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 2, 2, 3])
EPS = {torch.float32: 2**-23, torch.float64: 2**-52}


def scaled(mean: float, spread: float, dtype: torch.dtype) -> EstimatorInputs:
    """A batch whose rewards, values and baselines are about `mean`, apart by `spread`."""
    inputs = random_inputs(LENGTHS, seed=5, group_ids=GROUPS, token_rewards=None)
    moved = {
        name: mean + spread * getattr(inputs, name)
        for name in ("rewards", "values", "baseline_rewards", "reward_parts")
    }
    inputs = replace(inputs, **moved)
    return in_float32(inputs) if dtype == torch.float32 else inputs


def right_to_rounding(
    name: str, inputs: EstimatorInputs, options: dict[str, Any], *, of: float = 0.0
) -> None:
    """One rounding of the result, and what float64 loses on numbers as large as `of`."""
    result = build_estimator(name, **options)(inputs)
    advantages, returns = reference(name, inputs, **options)
    eps = EPS[result.advantages.dtype]
    for ours, expected in ((result.advantages, advantages), (result.returns, returns)):
        if ours is not None and expected is not None:
            assert ours.isfinite().all()
            torch.testing.assert_close(ours.double(), expected, rtol=8 * eps, atol=of * 2**-44)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rewards_of_any_size(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for mean, spread in ((1e4, 1e-2), (0.0, 1e-6), (-1.0, 1e6), (1e-3, 1e-5)):
        inputs = scaled(mean, spread, dtype)
        right_to_rounding(name, inputs, options, of=size_of(name, options, mean, spread))


def size_of(name: str, options: dict[str, Any], mean: float, spread: float) -> float:
    """The largest number from which an advantage is computed."""
    size: float = (
        abs(mean)
        + spread
        + sum(options.get(coefficient, 0.0) for coefficient in ("kl_coef", "distill_coef"))
    )
    if name == "grpo" and options.get("normalize_std", True):
        size /= min(spread, 1.0)  # divided by the std
    if name == "gdpo":
        size /= min(spread, 1.0) * options.get("eps", 1e-6)  # and by the std of the sums
    if name == "max_rl":
        size /= min(max(abs(mean), spread), 1.0)  # divided by the mean
    if ESTIMATORS[name].preferences:
        size = max(size, 1.0)  # from log-probs; rewards are only compared
    return size


@each_case
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_rewards_at_the_ends_of_float32(name: str, options: dict[str, Any], size: float) -> None:
    of = size + options.get("kl_coef", 0.0) + options.get("distill_coef", 0.0)
    right_to_rounding(
        name, scaled(0.0, size, torch.float32), options, of=max(of, 1.0) if name == "max_rl" else of
    )


@pytest.mark.parametrize(
    "name", ["ppo", "vapo", "reinforce++", "reinforce++_baseline", "remax", "rloo"]
)
@pytest.mark.parametrize("size", [1e4, 1e-6])
def test_log_ratios_of_any_size(name: str, size: float) -> None:
    inputs = random_inputs(LENGTHS, seed=6, group_ids=GROUPS)
    inputs = in_float32(replace(inputs, kl=size * inputs.kl, teacher_logprobs=-size * inputs.kl))  # type: ignore[operator]
    right_to_rounding(name, inputs, {"kl_coef": 1.0, "distill_coef": 1.0}, of=1 + 80 * size)


def test_a_small_kl_beside_a_large_reward_is_not_lost() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=cu((2, 1)), rewards=torch.tensor([1e4, 1e4]), group_ids=torch.tensor([0, 0]),
        kl=torch.tensor([1e-5, 1e-5, 4e-5]),
    )  # fmt: skip
    result = build_estimator("rloo", kl_coef=1.0)(inputs)  # in float32, 1e4 - 1e-5 is 1e4
    torch.testing.assert_close(
        result.advantages, torch.tensor([2e-5, 2e-5, -2e-5]), rtol=1e-6, atol=0
    )


def test_a_huge_value_leaves_no_trace_in_the_sequence_before_it() -> None:
    inputs = random_inputs((3, 3), token_rewards=None)
    small = build_estimator("ppo")(inputs).advantages[:3]
    values = inputs.values.clone()  # type: ignore[union-attr]
    values[3:] = 1e300
    assert torch.equal(build_estimator("ppo")(replace(inputs, values=values)).advantages[:3], small)


def test_a_teacher_that_rules_a_token_out_is_an_error_that_names_the_sequence() -> None:
    inputs = random_inputs((2, 3))
    teacher = inputs.teacher_logprobs.clone()  # type: ignore[union-attr]
    teacher[4] = float("-inf")
    with pytest.raises(OutputError, match="first in sequence 1"):
        build_estimator("reinforce++", distill_coef=0.1)(replace(inputs, teacher_logprobs=teacher))


MILLION = 1_000_000


@pytest.fixture(scope="module")
def long_batch() -> EstimatorInputs:
    """A million-token sequence between two short ones, float32, with a reward of 1e4 at its end."""
    generator = torch.Generator().manual_seed(0)

    def noise(n: int) -> Tensor:
        return torch.randn(n, generator=generator)

    size = MILLION + 5
    return EstimatorInputs(
        cu_seqlens=cu((2, MILLION, 3)), rewards=torch.tensor([1.0, 1e4, -1.0]), group_ids=torch.
        tensor([0, 0, 0]),
        values=noise(size), kl=noise(size).abs() / 100,
    )  # fmt: skip


def backwards(x: np.ndarray, decay: float) -> np.ndarray:
    """y_t = x_t + decay * y_{t+1} by scipy, in float64."""
    return lfilter([1.0], [1.0, -decay], x[::-1])[::-1]


@pytest.mark.parametrize(
    ("name", "options", "gamma", "lam"),
    [
        ("ppo", {"lam": 0.95}, 1.0, 0.95),
        ("ppo", {"lam": 1.0}, 1.0, 1.0),
        ("ppo", {"gamma": 0.999, "lam": 0.999}, 0.999, 0.999),
        ("vapo", {}, 1.0, 1 - 1 / (0.05 * MILLION)),
        ("reinforce++", {}, 1.0, 1.0),
        ("reinforce++", {"gamma": 0.99999}, 0.99999, 1.0),
        ("remax", {}, 1.0, 1.0),
    ],
    ids=case_id,
)  # fmt: skip
def test_a_million_tokens(
    long_batch: EstimatorInputs, name: str, options: dict[str, Any], gamma: float, lam: float
) -> None:
    inputs = replace(long_batch, baseline_rewards=torch.zeros(3))
    result = build_estimator(name, kl_coef=0.1, **options)(inputs)
    middle = slice(2, 2 + MILLION)
    r = -0.1 * inputs.kl[middle].double().numpy()  # type: ignore[index]
    r[-1] += 1e4
    v = inputs.values[middle].double().numpy() if name in ("ppo", "vapo") else np.zeros(MILLION)  # type: ignore[index]
    delta = r + gamma * np.append(v[1:], 0.0) - v
    expected = backwards(delta, gamma * lam)
    ours = result.advantages[middle].double().numpy()
    np.testing.assert_allclose(ours, expected, rtol=2**-23, atol=1e-9 * np.abs(expected).max())
    if name == "vapo":
        assert result.returns is not None
        np.testing.assert_allclose(
            result.returns[middle].double().numpy(),
            backwards(r, 1.0),
            rtol=2**-23,
            atol=1e-9 * np.abs(r).sum(),
        )
