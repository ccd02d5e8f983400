"""The reward `code` on a real sandbox: right, wrong and hostile code."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from rlcore.data.sample import Sample
from rlcore.errors import ConfigError
from tests.unit.rollout.rewards import reward_kit


def sample(code: str, label: Any, index: int = 0, fence: str = "```python\n{}\n```") -> Sample:
    empty = np.zeros(0, np.int32)
    arrays = (empty, empty.astype(np.uint8), empty.astype(np.float32))
    text = f"Let me think.\n{fence.format(code)}\nDone."
    return Sample(0, index, "p", 0, 0, *arrays, (), "stop", response_text=text, label=label)


def score(*samples: Sample, sandbox: dict[str, Any] | None = None, **args: Any) -> list[float]:
    part = {"function": "code", "args": {"timeout_s": 20, **args}}
    config = {"parts": {"code": part}, "sandbox": sandbox or {}, "on_error": -9.0}
    reward_kit.score(config, samples)
    return [s.reward for s in samples]


ADD = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
CALLS = {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"], "fn_name": "add"}
STATEMENTS = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]


def test_standard_input_and_output() -> None:
    batch = [
        sample("print(sum(map(int, input().split())))", ADD),
        sample("input(); print(3)", ADD),
        sample("print(1 / 0)", ADD),
        sample("print(3)", ADD, fence="{}"),
    ]
    assert score(*batch) == [1.0, 0.0, 0.0, 0.0]
    assert [s.metadata["correct"] for s in batch] == [True, False, False, False]
    problems = [s.metadata["reward_info"]["code"].get("problem") for s in batch]
    assert problems[0] is None
    assert "wrong answer" in problems[1]
    assert "ZeroDivisionError" in problems[2]
    assert "no block of Python" in problems[3]


def test_the_share_of_tests() -> None:
    batch = [sample("input(); print(3)", ADD), sample("print(sum(map(int, input().split())))", ADD)]
    assert score(*batch, score="share") == [pytest.approx(1 / 3), 1.0]
    assert [s.metadata["correct"] for s in batch] == [False, True]
    assert score(batch[0], score="share", tests=1) == [1.0]


def test_calls_of_functions_and_of_solutions() -> None:
    function = "def add(a: int, b: int) -> int:\n    print('noise')\n    return a + b"
    method = "class Solution:\n    def add(self, a: List[int], b):\n        return a + b"
    batch = [
        sample(function, CALLS),
        sample(method, CALLS),
        sample("def add(a, b): return str(a + b)", CALLS),
        sample("def plus(a, b): return a + b", CALLS),
    ]
    assert score(*batch) == [1.0, 1.0, 0.0, 0.0]


def test_statements() -> None:
    batch = [sample("def add(a, b): return a + b", STATEMENTS), sample("add = min", STATEMENTS)]
    assert score(*batch) == [1.0, 0.0]
    assert score(*batch, score="share") == [1.0, 0.0]


def test_the_column_of_the_entry_point_names_what_a_check_is_for() -> None:
    label = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    batch = [sample("def add(a, b): return a + b", label), sample("add = min", label)]
    for one in batch:
        one.metadata["entry_point"] = "add"
    assert score(*batch) == [1.0, 0.0]


def test_a_label_that_cannot_be_judged_is_an_error_and_no_wrong_answer() -> None:
    one = sample("def call(f): return f(1)", ["assert call(lambda x: x) == 1"])
    assert score(one) == [-9.0]
    assert "gives the solution a function" in one.metadata["reward_error"]


def test_numbers_of_more_than_4300_digits() -> None:
    power = {"inputs": ["7 6000"], "outputs": [str(Decimal(7**6000))]}
    program = "a, b = map(int, input().split())\nprint(a ** b)"
    echo = {"inputs": power["outputs"], "outputs": power["outputs"]}
    function = {"inputs": ["7\n6000"], "outputs": power["outputs"], "fn_name": "f"}
    batch = [
        sample(program, power),
        sample("print(int(input()))", echo),
        sample("def f(a, b): return a ** b", function),
        sample("def f(a, b): return a ** b", [f"assert f(7, 6000) == {power['outputs'][0]}"]),
        sample("def f(a, b): return a ** b + 1", function),
    ]
    assert score(*batch) == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_hostile_code_costs_its_own_sample_alone() -> None:
    good = sample("print(sum(map(int, input().split())))", ADD)
    hostile = [
        sample("import os\nwhile True: os.fork()", ADD, 1),
        sample("x = [bytearray(1 << 26) for _ in range(999)]", ADD, 2),
        sample("while True: print('x' * 999999)", ADD, 3),
        sample("while True: pass", ADD, 4),
        sample("import socket; socket.create_connection(('127.0.0.1', 80))", ADD, 5),
    ]
    found = score(good, *hostile, good, timeout_s=4)
    assert found == [1.0, *[0.0] * len(hostile), 1.0]


def test_a_sandbox_that_fails_is_an_error_and_no_wrong_answer() -> None:
    with pytest.raises(ConfigError, match="runs no program"):
        score(
            sample("x", ADD), sandbox={"kind": "fusion", "url": "http://127.0.0.1:9", "retries": 0}
        )
    bad = sample("print(1)", {"inputs": ["1"]})
    assert score(bad) == [-9.0]
    assert "has inputs and outputs" in bad.metadata["reward_error"]
