"""The contract test of curricula: ours keeps every rule, each wrong one breaks its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.algorithms.testing import ContractError
from rlcore.data.curriculum import PromptHistory
from rlcore.data.curriculum import testing as rules
from rlcore.data.curriculum.plugin import build_curriculum
from rlcore.data.curriculum.testing import check_curriculum
from rlcore.errors import RunFailed
from tests.pages import blocks


class Hardest:
    """A right one: harder prompts first, by the failures of each."""

    def __init__(self, *, floor: float = 0.01) -> None:
        self.floor = floor

    def __call__(self, history: PromptHistory) -> np.ndarray[Any, Any]:
        return np.where(history.told > 0, 1 - np.nan_to_num(history.pass_rate), 1) + self.floor


def leaves_nan(history: PromptHistory) -> np.ndarray[Any, Any]:
    return 1.1 - history.pass_rate


def negative(history: PromptHistory) -> np.ndarray[Any, Any]:
    return 0.5 - np.nan_to_num(history.pass_rate)


def too_short(history: PromptHistory) -> np.ndarray[Any, Any]:
    return np.ones(len(history) - 1)


def a_list(history: PromptHistory) -> list[float]:
    return [1.0] * len(history)


def words(history: PromptHistory) -> np.ndarray[Any, Any]:
    return np.full(len(history), "1")


def nothing(history: PromptHistory) -> np.ndarray[Any, Any]:
    return np.zeros(len(history))


def writes(history: PromptHistory) -> np.ndarray[Any, Any]:
    history.right[:] = 1
    return np.ones(len(history))


class Noisy:
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, history: PromptHistory) -> np.ndarray[Any, Any]:
        return 1 + self.random.random(len(history))


class Remembers:
    """Weights that grow with calls, until they stop."""

    calls = 0

    def __init__(self) -> None:
        Remembers.calls += 1
        self.mine = Remembers.calls

    def __call__(self, history: PromptHistory) -> np.ndarray[Any, Any]:
        return np.ones(len(history)) * self.mine


def first_first(history: PromptHistory) -> np.ndarray[Any, Any]:
    return 1.0 / (1 + np.arange(len(history)))


def only_the_hard(history: PromptHistory) -> np.ndarray[Any, Any]:
    rate = np.nan_to_num(history.pass_rate)
    return (rate < 0.9).astype(float) if (rate < 0.9).any() else np.ones(len(history))


WRONG: list[tuple[Any, str, str]] = [
    (leaves_nan, "weights", "gave prompt 0 the weight nan"),
    (negative, "weights", "the weight -0.5"),
    (too_short, "weights", r"returned shape \(0,\), expected an array \[N\] = \[1\]"),
    (a_list, "weights", "returned list, expected an array"),
    (words, "weights", "expected numbers"),
    (nothing, "weights", "some prompt must be drawn"),
    (writes, "read-only", "read-only"),
    (Noisy, "deterministic", "asked again"),
    (Remembers, "stateless", "a new instance"),
    (first_first, "order", "in another order"),
    (only_the_hard, "reachable", "has the weight 0"),
]


@pytest.mark.parametrize("keywords", [{}, {"target": 0.2}, {"target": 0.9, "floor": 1e-3}])
def test_ours_keeps_the_contract(keywords: dict[str, float]) -> None:
    report = check_curriculum("pass_rate", **keywords)
    assert len(report.kept) == 6
    assert not report.skipped
    assert "curriculum 'pass_rate' keeps 6 rules, 0 skipped" in str(report)


def test_one_of_a_user_comes_in_any_form() -> None:
    assert len(check_curriculum(Hardest, floor=0.5).kept) == 6
    assert len(check_curriculum(f"{__name__}:Hardest").kept) == 6
    assert [rule.name for rule in check_curriculum(Hardest()).skipped] == ["stateless"]
    with pytest.raises(TypeError, match="floor: the curriculum is built already"):
        check_curriculum(Hardest(), floor=0.5)


@pytest.mark.parametrize(
    ("curriculum", "rule", "said"),
    WRONG,
    ids=lambda x: x[:30] if isinstance(x, str) else getattr(x, "__name__", type(x).__name__),
)
def test_a_wrong_one_is_caught(curriculum: Any, rule: str, said: str) -> None:
    with pytest.raises(ContractError, match=said) as caught:
        check_curriculum(curriculum)
    assert caught.value.rule.name == rule, str(caught.value)
    assert f"to do: {caught.value.rule.advice}" in str(caught.value)


def test_no_rule_is_without_one_that_breaks_it() -> None:
    assert {rule for _, rule, _ in WRONG} == {rule.name for rule in rules._RULES}


def test_one_may_say_that_it_means_it() -> None:
    assert len(check_curriculum(first_first, uses_order=True).kept) == 4
    assert len(check_curriculum(only_the_hard, leaves_out=True).kept) == 4


def test_the_example_of_the_documentation_keeps_the_contract() -> None:
    page = Path(__file__).parents[4] / "docs" / "data.md"
    (example,) = (one.text for one in blocks(page) if "class " in one.text)
    names: dict[str, Any] = {}
    exec(example, names)
    assert len(check_curriculum(names["HardestFirst"], leaves_out=True).kept) == 5


def test_keywords_are_checked() -> None:
    with pytest.raises(ValueError, match=r"'pass_rate'.*tarjet"):
        build_curriculum("pass_rate", tarjet=0.3)
    with pytest.raises(ValueError, match="target: expected a number between 0 and 1, got 1"):
        build_curriculum("pass_rate", target=1.0)
    with pytest.raises(ValueError, match="floor: expected a number above 0"):
        build_curriculum("pass_rate", floor=0.0)
    with pytest.raises(ValueError, match=r"unknown curriculum 'passrate'.*pass_rate"):
        build_curriculum("passrate")


def test_what_a_curriculum_raises_names_it_in_a_run() -> None:
    def broken(history: PromptHistory) -> np.ndarray[Any, Any]:
        raise KeyError("difficulty")

    history = next(rules._histories(0))[1]
    with pytest.raises(
        RunFailed,
        match=r"data.curriculum: .*broken' failed: KeyError: 'difficulty' \(.*:\d+ in broken\)",
    ):
        rules.guard_curriculum(broken)(history)
