"""The reward `code` cannot be had without solving the task, whatever form its tests have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.code_tricks import HELPERS, HONEST, TRICKS
from tests.integration.test_code_reward import sample, score

CHECK = """
METADATA = {"author": "x"}


def check(candidate):
    assert candidate(4) == 16, "the first"
    assert [candidate(x) for x in (2, 3)] == [4, 9]


check(f)
"""
LABELS: dict[str, Any] = {
    "program": {"inputs": ["4\n", "7\n"], "outputs": ["16\n", "49\n"]},
    "function": {"fn_name": "f", "inputs": [[4], [7]], "outputs": [16, 49]},
    "assertions": ["assert f(4) == 16", "assert 49 == f(7), 'seven'"],
    "text": "import math\nx = 4\nassert math.isclose(f(x), 16.0)\ny = f(7)\nassert abs(y - 49) < 1e-6",
    "check": CHECK,
    "containers": [
        "assert f(4) in (15, 16)",
        "assert {f(7)} == {49}",
        "assert sorted([f(2), f(1)]) == [1, 4]",
        "assert str(f(3)) == '9'",
        "assert {'a': [f(3)]} == {'a': [9]}",
        "assert len([0] * f(2)) == 4",
    ],
    "truth": [
        "assert (f(4) == 16) is True",
        "assert not f(7) != 49",
        "assert f(0) is not None and f(0) == 0",
        "assert f(4) == f(-4) == 16",
        "assert isinstance(f(3), int) and 8 < f(3) < 10",
    ],
}


@pytest.mark.parametrize("form", LABELS)
def test_no_trick_scores(form: str) -> None:
    batch = [written(code, form, at) for at, code in enumerate(TRICKS.values())]
    found = score(*batch, score="share")
    assert {name: points for name, points in zip(TRICKS, found) if points != 0} == {}


@pytest.mark.parametrize("form", LABELS)
def test_honest_solutions_score(form: str) -> None:
    batch = [written(code, form, at, helpers="") for at, code in enumerate(HONEST.values())]
    if form == "program":  # where all that is printed counts
        batch = [one for one in batch if "start" not in one.response_text]
    assert score(*batch) == [1.0] * len(batch)


def written(code: str, form: str, at: int, helpers: str = HELPERS) -> Any:
    """A sample; a program reads the argument and prints the result."""
    future, code = ("", code) if "__future__" not in code else code.split("\n", 1)
    ending = "\nprint(f(int(input())))" if form == "program" else ""
    return sample(f"{future}\n{helpers}\n{code}{ending}", LABELS[form], at)
