"""`math` on the answers of Math-Verify's own tests (0.9.0), those of up to 600 characters.

The file has gold, prediction and what Math-Verify's test expects, a row a line. Left out are cases
that set options which `math` does not have (a coarser precision, other comparisons of variables).
"""

# ruff: noqa: E501
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollout.rewards.graders.mathematics import math

CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("math_verify_cases.jsonl").read_text().splitlines()
]
# and why `math` says otherwise
DIFFERENT = [
    # a comma in a label parts two numbers
    ["1,22", "1.22", True],
    # what is still to be computed or solved is no answer
    ["$10$", "Answer \\( (9+1) \\)", True],
    # Math-Verify looks for LaTeX alone there
    ["$9$", "Answer $ \n 9 \n $", False],
    ["$9$", "Answer \\( \n 9 \n \\)", False],
    ["$1$", "$\\frac3{3} $", True],
    ["$x < 1$", "$-x > -1$", True],
    ["$x <= 1$", "$-x >= -1$", True],
    [
        r"$\begin{pmatrix}6 & 8 \\ 10 & 12\end{pmatrix}$",
        r"The sum is $\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix} + \begin{pmatrix}5 & 6 \\ 7 & 8\end{pmatrix}$",
        True,
    ],
    [
        r"$\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}$",
        r"When multiplying by identity: $\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix} \begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}$",
        True,
    ],
    # the last box counts where words stand between boxes
    ["$$(3, 3), (1, 1)$$", r"$$\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}$$", True],
    [
        "$y_{1}=-2 x^{2}+4 x+3, y_{2}=3 x^{2}+12 x+10$",
        r"\($y_1 = \boxed{-2(x - 1)^2 + 5} \) and \( y_2 = \boxed{3(x + 2)^2 - 2} \) ",
        True,
    ],
]


def graded(response: str, label: str, **arguments: Any) -> bool:
    sample = SimpleNamespace(response_text=response, prompt_text="", label=label)
    return bool(math(sample, **arguments)["correct"])  # type: ignore[arg-type]


def test_math_agrees_with_math_verifys_tests() -> None:
    assert len(CASES) > 200
    assert [case for case in CASES if graded(case[1], case[0]) is not case[2]] == DIFFERENT
