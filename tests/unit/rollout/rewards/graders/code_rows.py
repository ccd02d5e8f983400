r"""Rows as public data sets of code have them, each with a right solution and a wrong one.

The columns, their types and the forms of the tests are the sets'; the tasks are ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class CodeRow:
    """A row without its label, which is under `label`; and solutions."""

    name: str
    label: Any
    row: dict[str, Any]
    right: str
    wrong: str
    tests: int = 1


FIRST = "def first(s, c):\n    return s.replace(c, '', 1)"
LAST = "def first(s, c):\n    return s[::-1].replace(c, '', 1)[::-1]"
FIRST_TESTS = ['assert first("hello","l") == "helo"', 'assert first("abcda","a") == "bcda"']
HEIGHT = """class Node:
    def __init__(self, data):
        self.data = data
        self.left = None
        self.right = None

def height(node):
    return 0 if node is None else 1 + {how}(height(node.left), height(node.right))
"""
# MBPP writes them with carriage returns
TREE = "root = Node(1) \r\nroot.left = Node(2) \r\nroot.left.left = Node(3) \r\nroot1 = Node(1)"
AREA = "import math\ndef area(r):\n    return {}"

MBPP = [
    CodeRow(
        "full",
        FIRST_TESTS,
        {"task_id": 11, "code": FIRST, "test_setup_code": "", "challenge_test_list": []},
        FIRST, LAST, 2,
    ),
    CodeRow(
        "parquet", np.array(FIRST_TESTS, dtype=object),
        {"test_setup_code": "", "challenge_test_list": np.array([], dtype=object)},
        FIRST, LAST, 2,
    ),
    CodeRow("as Python", repr(FIRST_TESTS), {"test_setup_code": None}, FIRST, LAST, 2),
    CodeRow("as JSON", json.dumps(FIRST_TESTS), {"test_imports": None}, FIRST, LAST, 2),
    CodeRow(
        "with a setup", ["assert (height(root)) == 3", "assert (height(root1)) == 1"],
        {"test_setup_code": TREE}, HEIGHT.format(how="max"), HEIGHT.format(how="min"), 2,
    ),
    CodeRow(
        "sanitized", ["assert math.isclose(area(2), tau * 2, rel_tol=0.001)"],
        {"source_file": "x", "test_imports": ["import math", "from math import tau"]},
        AREA.format("math.pi * r * r"), AREA.format("3 * r * r"),
    ),
    CodeRow(
        "sanitized, parquet", np.array(["assert close(area(2), 12.566, rel_tol=0.001)"]),
        {"test_imports": np.array(["from math import isclose as close"], dtype=object)},
        AREA.format("math.pi * r * r"), AREA.format("3 * r * r"),
    ),
    CodeRow(
        "imports as text", ["assert close(area(2), 12.566, rel_tol=0.001)"],
        {"test_imports": '["from math import isclose as close"]'},
        AREA.format("math.pi * r * r"), AREA.format("3 * r * r"),
    ),
]  # fmt: skip

PROMPT = '''from typing import List
import math


def poly(xs: List[int], x: float):
    """
    Evaluates polynomial with coefficients xs at point x.
    """

    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])


def find_zero(xs: List[int]):
    """ xs are coefficients. find_zero finds x such that poly(x) = 0.
    >>> round(find_zero([1, 2]), 2) # f(x) = 1 + 2x
    -0.5
    """
'''
CHECK = """

METADATA = {}


def check(candidate):
    for coeffs in ([1, 2], [3, -6], [-8, 4]):
        solution = candidate(coeffs)
        assert abs(poly(coeffs, solution)) < 1e-4

"""
# without what the prompt gave
ZERO = """def find_zero(xs: List[int]):
    x = -xs[0] / xs[1]
    return x if math.fabs(poly(xs, x)) < 1 else None
"""
# the helper of the test is not the solution's
OWN_POLY = "def poly(xs, x):\n    return 0\ndef find_zero(xs):\n    return 0.25\n"
SQUARE = "def square(x):\n    return x * x"
DOUBLE = "def square(x):\n    return x + x"
ASSERTION = """import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False


def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"


"""
INPUTS = "inputs = [[3], [4], [-1.5]]\nresults = [9, 16, 2.25]\n"
LOOP = "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion({}(*inp), exp, 0)\n"


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


HUMAN_EVAL = [
    CodeRow(
        "a helper of the prompt", CHECK,
        {"task_id": "HumanEval/32", "prompt": PROMPT, "entry_point": "find_zero"},
        ZERO, OWN_POLY,
    ),
    CodeRow(
        "the whole file", CHECK, {"prompt": PROMPT, "entry_point": "find_zero"},
        PROMPT.partition("def find_zero")[0] + ZERO, OWN_POLY,
    ),
    CodeRow(
        "EvalPlus, HumanEval+",
        ASSERTION + "def check(candidate):\n" + indented(INPUTS + LOOP.format("candidate")),
        {"prompt": "def square(x):\n    pass", "entry_point": "square"}, SQUARE, DOUBLE,
    ),
    CodeRow(
        "EvalPlus, MBPP+", ASSERTION + INPUTS + LOOP.format("square"),
        {"test_imports": [], "test_list": ["assert square(2) == 4"], "prompt": "Squares."},
        SQUARE, DOUBLE,
    ),
]  # fmt: skip

ROWS = [*MBPP, *HUMAN_EVAL]
