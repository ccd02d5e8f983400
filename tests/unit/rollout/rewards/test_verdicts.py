"""What a reward function may return, and what is a failure."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rollout.rewards.base import MAX_INFO, RewardFailure, Verdict, checked


@pytest.mark.parametrize("number", [1, 0.5, True, np.float32(2.5), np.bool_(True), Fraction(1, 4)])
def test_a_number_is_a_score_alone(number: Any) -> None:
    assert checked(number) == Verdict(float(number), None, {}, {})


def test_a_mapping_says_more() -> None:
    value = {"score": 1, "correct": np.bool_(True), "parts": {"a": 2}, "info": {"why": ["b", 1]}}
    assert checked(value) == Verdict(1.0, True, {"a": 2.0}, {"why": ["b", 1]})
    assert checked({"score": 0.0, "correct": None, "parts": None}) == Verdict(0.0)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.inf, "returned inf, expected a finite number"),
        (1e39, "returned 1e+39, expected a finite number"),
        (10**400, "returned inf, expected a finite number"),
        ("1", "returned str '1', expected a number"),
        (None, "returned NoneType"),
        ({}, "without 'score'"),
        ({"score": "good"}, "returned str 'good'"),
        ({"score": 1, "reward": 1}, "the unknown key 'reward'"),
        ({"score": 1, "correct": "yes"}, "correct: 'yes', expected True, False or None"),
        ({"score": 1, "correct": 1}, "correct: '1'"),
        ({"score": 1, "parts": {"a": math.nan}}, "returned nan"),
        ({"score": 1, "parts": [1]}, "parts: '[1]', expected a mapping by names"),
        ({"score": 1, "info": {"a": {1, 2}}}, "info that is not JSON"),
        ({"score": 1, "info": {1: "a"}}, "info: \"{1: 'a'}\", expected a mapping by names"),
        ({"score": 1, "info": {"a": "x" * MAX_INFO}}, f"expected at most {MAX_INFO}"),
    ],
)
def test_anything_else_is_a_failure_that_says_what_was_got(value: Any, reason: str) -> None:
    failure = checked(value)
    assert isinstance(failure, RewardFailure)
    assert failure.kind == "error"
    assert reason in failure.reason


def test_info_is_what_a_recorder_can_write() -> None:
    assert checked({"score": 1, "info": {"a": (1, math.nan)}}) == Verdict(
        1.0, info={"a": [1, None]}
    )
    for info in ({"a": "\ud800"}, {"a": 1 << 70}, {"\ud800": 1}):
        failure = checked({"score": 1, "info": info})
        assert isinstance(failure, RewardFailure)
        assert "info that is not JSON" in failure.reason
