"""Tests of code as labels have them, and what counts as the same answer."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.rewards.graders.code_tests import (
    CodeTest,
    last_block,
    passed,
    program_of,
    read_tests,
    same_text,
    same_value,
)

PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


@pytest.mark.parametrize(
    "label",
    [
        PAIRS,
        {**PAIRS, "fn_name": None},  # parquet gives every row the keys of all
        json.dumps(PAIRS),
        [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7\n"}],
        json.dumps(
            [
                {"input": "1 2\n", "output": "3\n", "type": "stdin_stdout", "metadata": None},
                {"input": "3 4\n", "output": "7\n", "testtype": "stdin"},
            ]
        ),
    ],
)
def test_standard_input_and_output(label: object) -> None:
    expected = [CodeTest("1 2\n", "3\n"), CodeTest("3 4\n", "7\n")]
    assert read_tests(label, {}) == expected
    assert read_tests(label if isinstance(label, str) else repr(label), {}) == expected


@pytest.mark.parametrize(
    "label",
    [
        {"inputs": ["1\n[2, 3]"], "outputs": ["[4]"], "fn_name": "add"},
        {"inputs": [[1, [2, 3]]], "outputs": [[4]], "fn_name": "add"},
        [{"input": "1\n[2, 3]", "output": "[4]", "metadata": {"func_name": "add"}}],
    ],
)
def test_calls(label: object) -> None:
    assert read_tests(label, {}) == [CodeTest([1, [2, 3]], [4], "add")]


def test_a_function_that_a_column_of_the_row_names() -> None:
    """As LiveCodeBench has it."""
    label = json.dumps([{"input": "1\n[2, 3]", "output": "[4]", "testtype": "functional"}])
    for metadata in ('{"func_name": "add"}', {"func_name": "add"}):
        assert read_tests(label, {"metadata": metadata}) == [CodeTest([1, [2, 3]], [4], "add")]
    with pytest.raises(ValueError, match="names no function"):
        read_tests(label, {"metadata": "{}"})


def test_a_text_that_looks_like_json_is_the_result_as_it_is() -> None:
    [test] = read_tests({"fn_name": "add", "inputs": [["11", "123"]], "outputs": ["134"]}, {})
    assert test.expected == "134"
    # the second where the label has JSON
    for result in ('"134"', "134"):
        assert passed(test, said(result, "token"), "token")
    assert not passed(test, said('"135"', "token"), "token")


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (7, "expected a map or a list"),
        ("42", "expected a map or a list"),
        ("forty-two", "the label must be tests"),
        (None, "expected a map or a list"),
        ([3], "the label must be tests"),
        ([], "the label must be tests"),
        ({"inputs": ["1"]}, "has inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ([{"input": "1"}], "'output'"),
        ({"inputs": ["x y"], "outputs": ["1"], "fn_name": "f"}, "the label must be tests"),
        ("assert f(1) == [", "the label must be tests.*no Python"),
        (["assert f(1) == 2", "assert f(1) == ["], "no Python"),
        ("def check(candidate): assert candidate(1)", "column entry_point"),
        (["assert True"], "nothing of a solution is tested by 'assert True'"),
        ("def f(x): return x\nassert f(1) == 1", "nothing of a solution is tested"),
        ("[" * 100_000, "the label must be tests"),
        ("assert f(" + "-" * 100_000 + "1)", "the label must be tests"),
    ],
)
def test_other_labels_are_refused(label: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_tests(label, {})


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx\n```", "x\n"),
        ("first\n```python\na\n```\nbetter:\n```py\nb\n```\n```bash\nls\n```", "b\n"),
        ("1. so:\n   ```\n   c\n   ```", "c\n"),
        ("<think>\n```python\nno\n```\n</think>\n```python\nyes\n```", "yes\n"),
        ("```Python title=x\nd\n```", "d\n"),
        ("<think>\n```python\nno\n```\n</think> none", None),
        ("no code", None),
        ("```python\ncut off", None),
        ("```python\n\n```", None),
    ],
)
def test_the_last_block(response: str, code: str | None) -> None:
    assert last_block(response) == code


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("0.3333333333", "0.333333333", True),
        ("1.0", "1", True),
        ("1e5", "100000", True),
        ("1.0000001", "1", False),
        ("1", "1.0", True),
        ("1000000000000001", "1000000000000002", False),
        ("1 2 3", "1\n2\n3", False),
        ("yes", "Yes", False),
        ("", "", True),
        ("1", "", False),
        ("x.", "1.", False),
        ("0.000000", "0.0000004", True),
        ("0.000002", "0.0000004", False),
        ("1000000.9", "1000000.0", True),
        ("1000002.1", "1000000.0", False),
        ("1" + "0" * 400, "0.5", False),
        ("7" * 5000, "7" * 5000 + ".0", True),
        ("7" * 5000, "7" * 4999 + "8", False),
        ("1e400", "1e500", False),
        ("1e999999999", "0.5", False),
        ("1e999999999", "1e999999999.", False),
        ("1e99999999999999999999", "0.5", False),
        ("1e-999999999", "0.0", True),
        ("inf", "1e400", False),
        ("inf", "Infinity", True),
        ("-inf", "inf", False),
        ("nan", "NaN", True),
        ("nan", "1.5", False),
        ("snan", "nan", False),
        ("1_000.0", "1000.0", False),
        ("(1+2j)", "(1+2j)", True),
        ("(1+2j)", "1.0", False),
    ],
)
def test_same_text(output: str, expected: str, same: bool) -> None:
    assert same_text(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, [2.0000000001]], [1, [2.0]], True),
        (True, 1, True),
        (2.0, 2, True),
        (2.0000001, 2, False),
        (True, "True", False),
        ("1", 1, False),
        ({"1": 2}, {1: 2}, True),
        ([1], [1, 2], False),
        (None, None, True),
        (10**400, 0.5, False),
        (0.5, 10**400, False),
        (0.0000004, 0.0, True),
        (0.000002, 0.0, False),
        (float("nan"), float("nan"), True),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e308, False),
        (1e308, float("-inf"), False),
        ([], 0.0, False),
    ],
)
def test_same_value(value: object, expected: object, same: bool) -> None:
    assert same_value(value, expected) is same


def said(result: str, token: str = "TOKEN") -> str:
    """What the harness writes last."""
    return f'noise\n\n{token}{{"value": {result}}}\n'


def test_an_output_before_the_token_is_the_programs_own() -> None:
    test = CodeTest([1], 2, "f")
    assert passed(test, said("2"), "TOKEN")
    # as APPS wraps them
    assert passed(CodeTest([1], [2], "f"), said("2"), "TOKEN")
    assert not passed(test, "2\n", "TOKEN")
    assert not passed(test, said("2", "other"), "TOKEN")
    assert not passed(read_tests(["assert f(1)"], {})[0], "", "TOKEN")


def test_a_result_of_any_depth_or_length_is_judged() -> None:
    assert not passed(CodeTest([1], 2, "f"), said("[" * 100_000 + "]" * 100_000), "TOKEN")
    assert not passed(CodeTest([1], 2, "f"), said("7" * 100_000), "TOKEN")
    for depth in (1, 50, 100, 300, 900, 2000, 20_000):
        nested: Any = []
        for _ in range(depth):
            nested = [nested]
        text = "[" * (depth + 1) + "]" * (depth + 1)
        assert passed(CodeTest([1], nested, "f"), said(text), "TOKEN") or depth > 100


def test_what_is_expected_does_not_enter_the_sandbox() -> None:
    program = program_of(CodeTest([1], "EXPECTED", "f"), "code", "TOKEN")
    assert "EXPECTED" not in str(program)
    assert program.files == {"solution.py": b"code"}


def test_the_limit_of_digits_is_lifted_for_labels_alone() -> None:
    digits = "7" * 5000
    labels = [
        {"inputs": [digits], "outputs": [digits], "fn_name": "f"},
        f'{{"inputs": [[{digits}]], "outputs": [{digits}], "fn_name": "f"}}',
        f'{{"inputs": [{digits}], "outputs": [{digits}]}}',
        f"assert f({digits}) == {digits}",
    ]
    for label in labels:
        (test,) = read_tests(label, {})
        assert digits in program_of(test, "code", "TOKEN").stdin
    (test,) = read_tests(labels[1], {})
    assert passed(test, said(digits), "TOKEN")
    assert not passed(test, said(digits[:-1] + "8"), "TOKEN")
    with pytest.raises(ValueError, match="got int '"):
        read_tests(7**6000, {})
    with pytest.raises(ValueError, match="4300 digits"):
        int(digits)


NUMBERS = st.one_of(
    st.integers(), st.integers(-1, 1).map(lambda sign: sign * 10**5000), st.floats(), st.booleans()
)
JSON = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
WORDS = st.one_of(
    NUMBERS.map(lambda number: str(Decimal(number))),
    st.from_regex(r"[+-]?[0-9]{0,4}\.?[0-9]{0,3}([eE][+-]?[0-9]{1,22})?", fullmatch=True),
    st.sampled_from(["nan", "sNaN", "-inf", "Infinity", "1_0", "٣.٣", "0x1p3", "1e", "--1"]),
    st.text(max_size=4),
)


@given(JSON, JSON)
def test_any_two_values_are_the_same_or_not(value: Any, expected: Any) -> None:
    assert same_value(value, expected) in (True, False)


@given(WORDS, WORDS)
def test_any_two_words_are_the_same_or_not(output: str, expected: str) -> None:
    assert same_text(output, expected) in (True, False)
    assert same_text(output, output)


@given(st.one_of(JSON, st.text(max_size=20), JSON.map(lambda value: [value])))
def test_any_label_has_tests_or_is_refused(label: Any) -> None:
    with suppress(ValueError):
        assert read_tests(label, {})


CLASS = """
from __future__ import annotations
import pickle
from dataclasses import dataclass

@dataclass
class Point:
    x: int

def f(x):
    return pickle.loads(pickle.dumps(Point(x))).x
"""


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(a): return pow(a, 3, 7)", CodeTest([5], 6, "f")),
        ("def f(a): return [pow(3, a), gcd(4, 6), sqrt(4)]", CodeTest([40], [3**40, 2, 2], "f")),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", CodeTest([20_000], 20_000, "f")),
        (CLASS, CodeTest([3], 3, "f")),
        ("class Solution:\n    def merge(self, a): return a[::-1]", CodeTest([[1]], [1], "merge")),
        ("def f(n): return 7**n", CodeTest([6000], 7**6000, "f")),
        (CLASS, read_tests(["assert f(3) == 3"], {})[0]),
        ("print(7 ** 6000 > int(input()))", CodeTest("7" * 5000, "True")),
        ("print(__name__, end='')", CodeTest("", "__main__")),
    ],
)
def test_what_a_right_solution_takes_for_granted(code: str, test: CodeTest, tmp_path: Path) -> None:
    """The harness alone, without a sandbox."""
    program = program_of(test, code, "TOKEN")
    for name, content in program.files.items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-c", program.code]
    ran = subprocess.run(
        command, input=program.stdin, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert passed(test, ran.stdout, "TOKEN"), ran.stderr
