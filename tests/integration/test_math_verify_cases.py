"""`math` on the answers of Math-Verify's own tests (0.9.0), those of up to 600 characters.

The file has gold, prediction and what Math-Verify's test expects, a row a line. Left out are cases
that set options which `math` does not have (a coarser precision, other comparisons of variables).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from rollout.rewards.graders.mathematics import math

CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("math_verify_cases.jsonl").read_text().splitlines()
]
# and why `math` says otherwise
DIFFERENT = [
    ["1,22", "1.22", True],  # a comma in a label parts two numbers
    ["$9$", "Answer $ \n 9 \n $", False],  # Math-Verify looks for LaTeX alone there
    ["$9$", "Answer \\( \n 9 \n \\)", False],
    # the last box counts where words stand between boxes
    ["$$(3, 3), (1, 1)$$", r"$$\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}$$", True],
    [
        "$y_{1}=-2 x^{2}+4 x+3, y_{2}=3 x^{2}+12 x+10$",
        r"\($y_1 = \boxed{-2(x - 1)^2 + 5} \) and \( y_2 = \boxed{3(x + 2)^2 - 2} \) ",
        True,
    ],
]


def test_math_agrees_with_math_verifys_tests() -> None:
    assert len(CASES) > 200
    differs = []
    for gold, prediction, right in CASES:
        verdict = math(SimpleNamespace(response_text=prediction, prompt_text="", label=gold))  # type: ignore[arg-type]
        if verdict["correct"] is not right:
            differs.append([gold, prediction, right])
    assert differs == DIFFERENT
