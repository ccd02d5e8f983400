"""The tests of a programming task: read from a label, made into programs, judged by their output.

A label is one of these, or its JSON text, as verl, APPS, DeepCoder and MBPP write them:

    {"inputs": [text, ...], "outputs": [text, ...]}               standard input and output
    {"inputs": [...], "outputs": [...], "fn_name": "solve"}       arguments and result of a function
    [{"input": ..., "output": ...}, ...]                          either, one map a test
    ["assert add(1, 2) == 3", ...]                                statements that must not raise

Expected outputs never enter the sandbox. Assertions are executed there by a process that the
solution cannot reach (`code_harness.py`).
"""

from __future__ import annotations

import json
import marshal
import re
import sys
import textwrap
import threading
from binascii import b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

from rollout.rewards.base import LabelError
from rollout.rewards.graders.code_assertions import PRELUDE, Statement, statement_of, statements_of
from rollout.rewards.graders.places import after_thinking, literal_of
from rollout.sandbox import Program

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = {"", "py", "python", "python3"}
_HARNESS = Path(__file__).with_name("code_harness.py")
# Lifts Python's limit of 4,300 digits, and runs the program as `__main__`.
_MAIN = """import sys
getattr(sys, "set_int_max_str_digits", int)(0)
del sys
exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"))
"""
_PRELUDE = "\n".join(f"from {name} import *" for name in PRELUDE)
_NUMBER = re.compile(
    r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?|nan", re.IGNORECASE | re.ASCII
)
_DIGITS = 4000
_NO_TESTS = (AttributeError, KeyError, TypeError, ValueError, RecursionError, MemoryError)
TOLERANCE = Decimal("1e-6")
_EXACT_ENOUGH = Context(prec=40, Emax=10**17, Emin=-(10**17), traps=[])
_digits_lock = threading.Lock()


@dataclass(frozen=True)
class CodeTest:
    """One test: standard input and output, a call and its result, or a statement."""

    given: Any
    expected: Any = None
    function: str | None = None
    statement: Statement | None = None


class CannotJudge(LabelError):
    """The label cannot be judged for any solution."""


def last_block(response: str) -> str | None:
    """The last fenced block of Python in the response; None if there is none."""
    found = _BLOCK.findall(after_thinking(response))
    blocks = [code for language, code in found if language.lower() in _PYTHON]
    return textwrap.dedent(blocks[-1]) if blocks and blocks[-1].strip() else None


# --- labels ---------------------------------------------------------------------------------------


def read_tests(label: Any, row: Mapping[str, Any], prompt: str = "") -> list[CodeTest]:
    """The tests of a label; `row` has the other columns. Raises ValueError if there are none.

    Args:
        prompt: its code precedes the solution's, if the row has no column `prompt`.
    """
    with _any_number_of_digits():
        try:
            value = literal_of(label)
            tests = _read(value, {"prompt": prompt, **row})
        except _NO_TESTS as error:
            problem = f" ({error})"
        else:
            problem = ""
        if problem or not tests:
            raise ValueError(
                "the label must be tests: {inputs, outputs}, a list of {input, output}, or a list"
                f" of assertions; got {type(label).__name__} {str(label)[:80]!r}{problem}"
            )
    return tests


@contextmanager
def _any_number_of_digits() -> Iterator[None]:
    """Lift Python's limit on the digits of integers, for labels, whose authors are trusted."""
    with _digits_lock:
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            yield
        finally:
            sys.set_int_max_str_digits(limit)


def _read(value: Any, row: Mapping[str, Any]) -> list[CodeTest]:
    if isinstance(value, str):
        return [CodeTest(None, statement=one) for one in statements_of(value, row)]
    if isinstance(value, Mapping):
        if value.get("inputs") is None or value.get("outputs") is None:
            raise ValueError("a map of tests has inputs and outputs")
        inputs, outputs = (_listed(value[name], name) for name in ("inputs", "outputs"))
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
        name = value.get("fn_name") or None
        return [_pair(given, wanted, name) for given, wanted in zip(inputs, outputs)]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError("expected a map or a list")
    tests = []
    for one in value:
        if isinstance(one, str):
            tests.append(CodeTest(None, statement=statement_of(one, row)))
        else:
            tests.append(_pair(one["input"], one["output"], _function_of(one, row)))
    return tests


def _function_of(test: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """The function that a test calls; LiveCodeBench names it in a column of the row."""
    of_row = literal_of(row.get("metadata"))
    for given in (test, test.get("metadata"), row, of_row):
        if isinstance(given, Mapping) and (name := given.get("fn_name") or given.get("func_name")):
            return name
    if test.get("testtype") == "functional":
        raise ValueError(
            "a test of the type functional names no function: set fn_name, or func_name of the"
            " column metadata"
        )
    return None


def _listed(value: Any, name: str) -> list[Any]:
    """Check that `value` is a list, since a text or a map would also be iterable."""
    value = literal_of(value) if not isinstance(value, str) else value
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {type(value).__name__} {str(value)[:80]!r}")
    return value


def _pair(given: Any, wanted: Any, name: Any) -> CodeTest:
    if name is None:
        if given is None or wanted is None:
            raise ValueError("an input or output is null")
        return CodeTest(_text(given), _text(wanted))
    if not isinstance(name, str):
        raise ValueError(f"the name of a function must be text, got {name!r}")
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        # the result is JSON as well, or a text that is left as it is
        wanted = _decoded(wanted)
    return CodeTest(_listed(given, "the arguments of a call"), wanted, name)


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        # text without quotes stays as it is
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _text(value: Any) -> str:
    # APPS has some texts as lists of lines
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# --- programs -------------------------------------------------------------------------------------


@cache
def _harness() -> str:
    """The harness: bytecode for the same Python version, which saves 3 ms, otherwise source."""
    source = _HARNESS.read_text(encoding="utf-8")
    bytecode = marshal.dumps(compile(source, _HARNESS.name, "exec", dont_inherit=True))
    return f"""import marshal
from _frozen_importlib_external import MAGIC_NUMBER
from binascii import a2b_base64
same = MAGIC_NUMBER == {MAGIC_NUMBER!r}
exec(marshal.loads(a2b_base64({b2a_base64(bytecode)!r})) if same else {source!r})
"""


def program_of(test: CodeTest, code: str, token: str, **limits: Any) -> Program:
    """The program for a test; `passed` judges its output."""
    files = {"solution.py": code.encode("utf-8", "replace")}
    if test.function is None and test.statement is None:
        return Program(_MAIN, stdin=test.given, files=files, **limits)
    statement = test.statement or Statement("", ())
    task = {
        "token": token,
        "function": test.function,
        "arguments": test.given,
        "prelude": test.statement.prelude if test.statement else _PRELUDE,
        "statement": statement.text,
        "names": statement.names,
        "imports": statement.imports,
    }
    with _any_number_of_digits():
        return Program(_harness(), stdin=json.dumps(task), files=files, **limits)


def passed(test: CodeTest, output: str, token: str) -> bool:
    """Whether the output of a successful program is right. Raises CannotJudge."""
    if test.function is None and test.statement is None:
        return same_text(output, test.expected)
    _, found, answer = output.rpartition("\n" + token)
    if not found:
        return False
    try:
        said = json.loads(answer, parse_int=_whole)
        reason = said.get("cannot_judge")
        value = said.get("value")
    except (AttributeError, ValueError, RecursionError):
        # nested too deep, or written by a solution that obtained the token
        return False
    if reason is not None:
        raise CannotJudge(f"the label cannot be judged: {reason}")
    if test.statement is not None:
        return True
    try:
        # APPS wraps results into lists; some data sets write a result as JSON next to its arguments
        with _any_number_of_digits():
            results = (test.expected, _decoded(test.expected))
        return any(same_value(one, result) for one in (value, [value]) for result in results)
    except (AttributeError, ValueError, RecursionError):
        return False


def _whole(text: str) -> int | Decimal:
    """A solution's number, which may have so many digits that `int` would take minutes."""
    return int(text) if len(text) < _DIGITS else Decimal(text)


def same_text(output: str, expected: str) -> bool:
    """Compare by lines and words, tolerating white space and the last digits of decimals."""
    lines = [[line.split() for line in text.strip().splitlines()] for text in (output, expected)]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    return all(
        one == other or _same_number(one, other)
        for pair in zip(*lines)
        for one, other in zip(*pair)
    )


def _same_number(one: str, other: str) -> bool:
    if not _NUMBER.fullmatch(one) or not _NUMBER.fullmatch(other):
        return False
    try:
        # whole numbers must be equal in all digits, in any notation
        return _close(Decimal(one), Decimal(other), exact=not any(mark in other for mark in ".eE"))
    except InvalidOperation:
        # an exponent out of range
        return False


def _close(value: Decimal, expected: Decimal, *, exact: bool) -> bool:
    """The tolerance of contest judges: 1e-6, absolute or relative to the expected value."""
    if value.is_nan() or expected.is_nan():
        return value.is_nan() and expected.is_nan()
    if exact or value.is_infinite() or expected.is_infinite():
        return value == expected
    tolerance = _EXACT_ENOUGH.multiply(TOLERANCE, max(Decimal(1), expected.copy_abs()))
    return _EXACT_ENOUGH.subtract(value, expected).copy_abs() <= tolerance


def same_value(value: Any, expected: Any) -> bool:
    """Compare values of JSON; decimals may differ in their last digits."""
    if isinstance(value, int | float | Decimal) and isinstance(expected, int | float):
        # True is 1 and 2.0 is 2, as in an assertion
        return _close(Decimal(value), Decimal(expected), exact=not isinstance(expected, float))
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(map(same_value, value, expected))
        )
    if isinstance(expected, Mapping):
        return (
            isinstance(value, dict)
            and value.keys() == {str(key) for key in expected}
            and all(same_value(value[str(key)], expected[key]) for key in expected)
        )
    return type(value) is type(expected) and bool(value == expected)
