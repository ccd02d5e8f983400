"""Whitening of advantages over the batch and over groups."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algorithms import EstimatorInputs, normalize_advantages, whiten

from .helpers import LENGTHS, cu, random_inputs


def slow(x: list[float]) -> list[float]:
    """(x - mean) / sqrt(var + 1e-8), var with n - 1; 0 for one number."""
    mean = math.fsum(x) / len(x)
    variance = math.fsum((a - mean) ** 2 for a in x) / max(len(x) - 1, 1)
    return [(a - mean) / math.sqrt(variance + 1e-8) for a in x]


def slow_groups(advantages: Tensor, cu_seqlens: Tensor, group_ids: Tensor) -> Tensor:
    borders = cu_seqlens.tolist()
    groups = group_ids.tolist()
    owner = [groups[b] for b in range(len(groups)) for _ in range(borders[b], borders[b + 1])]
    out = torch.zeros(advantages.numel(), dtype=torch.float64)
    for group in set(owner):
        at = [t for t, g in enumerate(owner) if g == group]
        out[at] = torch.tensor(slow(advantages[at].double().tolist()), dtype=torch.float64)
    return out


def normalized(inputs: EstimatorInputs, mode: str) -> Tensor:
    """`normalize_advantages` of the values of a batch, taken for its advantages."""
    return normalize_advantages(inputs.values, inputs.cu_seqlens, inputs.group_ids, mode)  # type: ignore[arg-type]


def test_batch_is_whiten_over_all_tokens() -> None:
    inputs = random_inputs()
    assert torch.equal(normalized(inputs, "batch"), whiten(inputs.values))  # type: ignore[arg-type]
    expected = torch.tensor(slow(inputs.values.tolist()), dtype=torch.float64)  # type: ignore[union-attr]
    torch.testing.assert_close(normalized(inputs, "batch"), expected)


def test_none_leaves_them_alone() -> None:
    inputs = random_inputs()
    assert normalized(inputs, "none") is inputs.values


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(0, 6), max_size=8) | st.just([*LENGTHS]), seed=st.integers(0))
def test_group_is_the_loop_over_groups(lengths: list[int], seed: int) -> None:
    inputs = random_inputs(lengths, seed % 2**32)
    torch.testing.assert_close(
        normalized(inputs, "group"),
        slow_groups(inputs.values, inputs.cu_seqlens, inputs.group_ids),  # type: ignore[arg-type]
    )


def test_group_by_hand() -> None:
    cu_seqlens = cu((2, 1, 1, 0))
    groups = torch.tensor([9, -4, 9, 3])
    result = normalize_advantages(torch.tensor([1.0, 2.0, 7.0, 3.0]), cu_seqlens, groups, "group")
    # group 9: mean 2, std 1; -4: one token
    torch.testing.assert_close(result, torch.tensor([-1.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("mode", ["batch", "group"])
def test_float32_far_from_zero_is_right_to_its_rounding(mode: str) -> None:
    inputs = random_inputs(seed=2)
    values = (1e4 + 1e-2 * inputs.values).float()  # type: ignore[operator]
    result = normalize_advantages(values, inputs.cu_seqlens, inputs.group_ids, mode)  # type: ignore[arg-type]
    groups = inputs.group_ids if mode == "group" else torch.zeros_like(inputs.group_ids)
    assert result.dtype == torch.float32
    torch.testing.assert_close(
        result.double(), slow_groups(values, inputs.cu_seqlens, groups), rtol=2**-22, atol=1e-9
    )


@pytest.mark.parametrize("mode", ["batch", "group"])
def test_equal_advantages_become_nothing(mode: str) -> None:
    x = torch.full((sum(LENGTHS),), 0.1)
    result = normalize_advantages(x, cu(LENGTHS), torch.arange(len(LENGTHS)) % 2, mode)  # type: ignore[arg-type]
    torch.testing.assert_close(result, torch.zeros_like(x))


@pytest.mark.parametrize("mode", ["batch", "group", "none"])
@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_nothing_stays_nothing(mode: str, lengths: tuple[int, ...]) -> None:
    x = torch.zeros(0)
    ids = torch.zeros(len(lengths), dtype=torch.int64)
    assert normalize_advantages(x, cu(lengths), ids, mode).shape == (0,)  # type: ignore[arg-type]


def test_the_input_is_not_written() -> None:
    inputs = random_inputs()
    before = inputs.values.clone()  # type: ignore[union-attr]
    normalized(inputs, "group")
    assert torch.equal(inputs.values, before)  # type: ignore[arg-type]
    assert inputs.values._version == 0  # type: ignore[union-attr]


def test_bad_arguments_say_what_to_do() -> None:
    inputs = random_inputs()
    with pytest.raises(
        ValueError,
        match=r"unknown normalization 'groups'; known: batch, group, none; did you mean 'group'",
    ):
        normalized(inputs, "groups")
    with pytest.raises(ValueError, match=r"group_ids: expected shape \[B\] = \[9\], got \[8\]"):
        normalize_advantages(inputs.values, inputs.cu_seqlens, inputs.group_ids[:-1], "group")  # type: ignore[arg-type]
