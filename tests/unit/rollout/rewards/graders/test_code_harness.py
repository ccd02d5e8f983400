"""The judging process of the code tests: what crosses, and what a test may do with it.

The solution is served by a thread instead of a process; the processes, and attacks on them, are in
`tests/integration/test_code_tricks.py`.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.rewards.graders import code_harness, code_tests
from rollout.rewards.graders.code_harness import CannotJudge, Link, decode, encode, judge
from rollout.rewards.graders.code_tests import CodeTest, read_tests
from tests.integration.code_tricks import HELPERS, HONEST, VALUES
from tests.unit.rollout.rewards.graders.code_rows import (
    CHECK,
    OWN_POLY,
    PROMPT,
    ROWS,
    ZERO,
    CodeRow,
)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for the solution, none of its modules later, and failures that do not end pytest."""

    def failed(reason: str) -> None:
        raise AssertionError(reason)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(code_harness, "fail", failed)
    yield
    sys.modules.pop("solution", None)


def run(test: CodeTest, code: str) -> Any:
    Path("solution.py").write_text(code)
    statement = test.statement
    task = {
        "function": test.function,
        "arguments": test.given,
        "prelude": statement.prelude if statement else "",
        "statement": statement and statement.text,
        "names": statement and statement.names,
        "imports": statement and statement.imports,
    }
    with ExitStack() as stack:
        pipes = [os.pipe(), os.pipe()]
        asked, told = (stack.enter_context(os.fdopen(read)) for read, _ in pipes)
        ask, tell = (os.fdopen(write, "w") for _, write in pipes)

        def serve() -> None:
            # its end is the end of the pipe, as with a process
            with tell, suppress(SystemExit):
                code_harness.serve(asked, tell)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            return judge(Link(ask, told), task)
        finally:
            ask.close()
            serving.join(20)


@pytest.mark.parametrize(
    ("magic", "unused"),
    # a source that does not compile shows that the bytecode ran
    [(MAGIC_NUMBER, "def judge("), (b"of another Python", "no such text")],
    ids=["bytecode", "source"],
)
def test_a_python_of_another_version_takes_the_harness_as_source(
    monkeypatch: pytest.MonkeyPatch, magic: bytes, unused: str
) -> None:
    monkeypatch.setattr(code_tests, "MAGIC_NUMBER", magic)
    monkeypatch.setattr(code_tests, "_harness", code_tests._harness.__wrapped__)
    (test,) = read_tests(["assert f(1) == 2"], {})
    Path("solution.py").write_text("def f(a): return a + 1")
    program = code_tests.program_of(test, "", "token", timeout_s=1, memory_mb=1)
    code = program.code.replace(unused, "(")
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], input=program.stdin, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert code_tests.passed(test, done.stdout, "token")


def passes(
    label: Any, code: str, row: dict[str, Any] | None = None, prompt: str = ""
) -> list[bool]:
    """Whether each test of a label passes."""
    found = []
    for test in read_tests(label, row or {}, prompt):
        try:
            run(test, code)
        except Exception:  # noqa: BLE001 - by whatever the test fails
            found.append(False)
        else:
            found.append(True)
    return found


# every form that compares; right for squares alone
FORMS = [
    "assert f(4) == 16",
    "assert 49 == f(7), 'a message'",
    "assert f(4) != 17 and f(4) == 16",
    "assert (f(4) == 16) is True",
    "assert not f(7) != 49",
    "assert f(0) is not None and f(0) == 0",
    "assert f(4) == 4 * f(2) == 16",
    "assert isinstance(f(3), int) and 8 < f(3) < 10",
    "import math\nassert math.isclose(f(4), 16.0)",
    "assert math.isclose(f(4), 16.0)",
    "assert isclose(f(4), 16.0)",
    "assert abs(f(4) - 16) < 1e-6",
    "assert abs(16 - f(4)) <= 1e-6",
    "assert round(f(4), 3) == 16",
    "assert set([f(4)]) == {16}",
    "assert {f(7)} == {49}",
    "assert Counter([f(2)]) == Counter([4])",
    "assert sorted([f(2), f(1)]) == [1, 4]",
    "assert f(4) in (15, 16)",
    "assert 16 in [f(4)]",
    "assert str(f(3)) == '9'",
    "assert repr(f(3)) == '9'",
    "assert f'{f(3)}' == '9'",
    "assert {'a': [f(3)]} == {'a': [9]}",
    "assert len([0] * f(2)) == 4",
    "assert all(f(n) == n * n for n in range(5))",
    "assert tuple(map(f, [1, 2])) == (1, 4)",
    "x = 4\ny = f(x)\nassert y == 16",
    "from solution import f as g\nassert g(4) == 16",
    "import solution\nassert solution.f(4) == 16",
    "for n in (2, 3):\n    assert f(n) == n ** 2",
    "def check(candidate):\n    assert candidate(4) == 16\n    assert True\ncheck(f)",
    "def test_f():\n    assert f(4) == 16\ntest_f()",
    "try:\n    assert f(4) == 16\nexcept TypeError:\n    assert False",
    "class Test:\n    def run(self):\n        assert f(4) == 16\nTest().run()",
    "import numpy as np\nassert np.allclose([f(4), 1], [16, 1])",
    "assert np.array_equal([f(4)], [16])",
]


@pytest.mark.parametrize("statement", FORMS)
def test_no_value_says_yes_and_honest_ones_do(statement: str) -> None:
    tricks = {name: passes(statement, f"{HELPERS}\n{code}") for name, code in VALUES.items()}
    assert tricks == {name: [False] for name in VALUES}
    honest = {name: passes(statement, code) for name, code in HONEST.items()}
    assert honest == {name: [True] for name in HONEST}


def test_a_check_is_for_the_column_of_the_entry_point() -> None:
    text = "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(4) == 16\n"
    assert passes(text, "def f(x): return x * x", {"entry_point": "f"}) == [True]
    assert passes(text, "def sum(x): return x * x", {"entry_point": "sum"}) == [True]
    method = "class Solution:\n    def f(self, x): return x * x"
    assert passes(text, method, {"entry_point": "Solution().f"}) == [True]
    assert passes(text, "def f(x): return x", {"entry_point": "f"}) == [False]


@pytest.mark.parametrize("given", ROWS, ids=[one.name for one in ROWS])
def test_rows_of_public_data_sets(given: CodeRow) -> None:
    assert passes(given.label, given.right, given.row) == [True] * given.tests
    assert False in passes(given.label, given.wrong, given.row)


def test_code_of_the_prompt_is_found_in_a_conversation() -> None:
    """As the column `prompt` is no column of a row where it is what the model is asked."""
    chat = f"<|im_start|>user\nComplete this, and import what you need.\n\n{PROMPT}<|im_end|>\n"
    row = {"entry_point": "find_zero"}
    assert passes(CHECK, ZERO, row, chat) == [True]
    assert passes(CHECK, OWN_POLY, row, chat) == [False]
    # of another function, or none
    assert passes(CHECK, ZERO, row, PROMPT.replace("find_zero", "other")) == [False]
    assert passes(CHECK, ZERO, row) == [False]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"test_setup_code": "x ="}, "the column test_setup_code is no Python"),
        ({"test_imports": ["import"]}, "the column test_imports is no Python"),
        ({"test_imports": [3]}, "test_imports must be text, or a list of it"),
        ({"test_setup_code": {"a": 1}}, "test_setup_code must be text, or a list of it"),
    ],
)
def test_a_setup_that_cannot_be_read_is_refused(row: dict[str, Any], reason: str) -> None:
    for label in (["assert f(1) == 1"], "assert f(1) == 1"):
        with pytest.raises(ValueError, match=reason):
            read_tests(label, row)


NODES = """
class Node:
    def __init__(self, value):
        self.value = value
        self.left = None
    def __len__(self): return depth(self)
    def __iter__(self): return iter([self.value])
    def __repr__(self): return f"Node({self.value})"
    def __eq__(self, other): return True
    def __contains__(self, other): return True
    def __getitem__(self, key): return self.value + key

def depth(node): return 0 if node is None else 1 + depth(node.left)
"""


@pytest.mark.parametrize(
    ("statement", "right"),
    [
        ("root = Node(1)\nroot.left = Node(2)\nassert depth(root) == 2", True),
        ("root = Node(1)\nroot.left = Node(2)\nassert root.left.value == 2", True),
        ("assert Node(5) and len(Node(5)) == 1 and list(Node(5)) == [5]", True),
        ("assert str(Node(5)) == repr(Node(5)) == 'Node(5)' and Node(5)[2] == 7", True),
        ("assert Node(5) == 5", False),
        ("assert Node(5) != 6", False),
        ("assert 5 in [Node(5)]", False),
        ("assert 5 in Node(4)", False),
        ("assert Node(5) in {5}", False),
        ("assert Node(5).missing", False),
    ],
)
def test_objects_of_the_solution_are_used_and_not_compared(statement: str, right: bool) -> None:
    assert passes(statement, NODES) == [right]


@pytest.mark.parametrize(
    ("code", "statement", "right"),
    [
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]", True),
        ("def f():\n    while True: yield 7", "assert next(f()) == 7", True),
        ("def f(n): return lambda x: x + n", "assert f(2)(3) == 5", True),
        ("def f(a): a.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]", True),
        ("def f(a, k): a[k] = {1}", "a = {}\nf(a, 2)\nassert a == {2: {1}}", True),
        # a solution that empties what it should have sorted
        ("def f(a):\n    a.clear()\n    return a", "a = [2, 1]\nassert f(a) == sorted(a)", False),
        (
            "def f(a): raise KeyError('no')",
            "try: f(1)\nexcept KeyError as e: assert e.args == ('no',)",
            True,
        ),
        (
            "class Bad(ValueError): pass\ndef f(a): raise Bad",
            "try: f(1)\nexcept ValueError: assert 1",
            True,
        ),
        ("def f(a): raise SystemExit", "try: f(1)\nexcept ValueError: assert 1", False),
        ("def sum(a, b): return a * b", "assert sum(3, 4) == 12", True),
        ("def gcd(a, b): return 1", "assert gcd(12, 18) == 1", True),
        ("def sum(a, b): return a * b", "assert set([sum(3, 4)]) == {12}", True),
        ("def f(a, *, k=1): return a * k", "assert f(2, k=3) == 6", True),
        ("LIMIT = 3", "assert LIMIT == 3", True),
        ("def f(a): return a", "assert f(b'x') == b'x' and f((1, {2})) == (1, {2})", True),
        ("def f(): return 7 ** 6000", "assert f() == 7 ** 6000", True),
    ],
)
def test_what_solutions_and_tests_do(code: str, statement: str, right: bool) -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert passes(statement, code) == [right]
    finally:
        sys.set_int_max_str_digits(limit)


def test_a_test_that_gives_what_cannot_cross_is_not_judged() -> None:
    (test,) = read_tests("assert f(lambda x: x) == 1", {})
    with pytest.raises(CannotJudge, match="gives the solution a function"):
        run(test, "def f(g): return g(1)")


class Sub(dict[str, int]):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "crossed"),
    [
        (value, value)
        for value in (
            *(None, True, 3, -(7**200), 2.5, float("inf"), "ü\ud800", b"\x00\xff", bytearray(b"x")),
            *([1, [2]], (1, (2,)), {1: "a", (2, 3): None}, {1, 2}, frozenset({(1,)}), 1 + 2j),
            *(range(1, 9, 3), collections.deque([1]), collections.Counter("aab")),
            collections.OrderedDict(b=1, a=2),
            *(decimal.Decimal("1e999999999"), fractions.Fraction(1, 3), datetime.date(2024, 2, 29)),
            *(datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.timedelta(1, 2, 3)),
            datetime.time(1, 2),
        )
    ]
    + [
        (Sub(a=1), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
    ],
)
def test_values_cross_as_plain_types(value: Any, crossed: Any) -> None:
    def no_object(value: Any) -> int:
        raise AssertionError(value)

    found = decode(json.dumps(encode(value, no_object)), no_object)
    assert type(found) is type(crossed)
    assert found == crossed


def test_arrays_cross() -> None:
    found = decode(json.dumps(encode(np.array([[1, 2]]), id)), id)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[1, 2]]
