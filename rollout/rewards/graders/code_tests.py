"""The tests of a programming task: read from a label, made into programs, judged by their output.

A label is one of these, or its JSON text, as verl, APPS, DeepCoder and MBPP write them:

    {"inputs": [text, ...], "outputs": [text, ...]}               standard input and output
    {"inputs": [...], "outputs": [...], "fn_name": "solve"}       arguments and result of a function
    [{"input": ..., "output": ...}, ...]                          either, one map a test
    ["assert add(1, 2) == 3", ...]                                statements that must not raise

What a program should answer never enters the sandbox, statements aside: there the code that is
tested shares a process with its tests, and could cheat.
"""

from __future__ import annotations

import ast
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rollout.rewards.graders.label_text import literal_of
from rollout.rewards.graders.places import after_thinking
from rollout.sandbox.base import Program

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = {"", "py", "python", "python3"}
# What solutions in the style of LeetCode take for granted; last what `math` hides, `pow`.
_PRELUDE = "\n".join(
    f"from {name} import *"
    for name in (
        *("typing", "collections", "heapq", "bisect", "itertools", "functools", "math"),
        "builtins",
    )
)
# The token says that the end was reached. The solution is not told: it stood in standard input,
# which is empty by the time that the solution runs.
# Dataclasses and pickle look for the solution's module by its name.
_HARNESS = """import json, os, sys, types
task = json.loads(sys.stdin.read())
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
module = sys.modules["solution"] = types.ModuleType("solution")
names = module.__dict__
if task["name"]:
    sys.setrecursionlimit(100_000)
    exec(task["prelude"], names)
with open("solution.py", encoding="utf-8") as file:
    exec(compile(file.read(), "solution.py", "exec"), names)
if task["name"]:
    if task["name"] not in names and "Solution" in names:
        found = getattr(names["Solution"](), task["name"])
    else:
        found = names[task["name"]]
    result = json.dumps(found(*task["arguments"]))
else:
    exec(compile(task["statement"], "test", "exec"), names)
    result = "null"
sys.stdout.flush()
os.write(1, ("\\n" + task["token"] + result + "\\n").encode())
"""


@dataclass(frozen=True)
class CodeTest:
    """One test: standard input and output, a call and its result, or a statement."""

    given: Any
    expected: Any = None
    function: str | None = None
    statement: bool = False


def last_block(response: str) -> str | None:
    """Return the last fenced block of Python in the response; None where there is none."""
    found = _BLOCK.findall(after_thinking(response))
    blocks = [code for language, code in found if language.lower() in _PYTHON]
    return textwrap.dedent(blocks[-1]) if blocks and blocks[-1].strip() else None


# --- labels ---------------------------------------------------------------------------------------


def read_tests(label: Any) -> list[CodeTest]:
    """Return the tests of a label. Raises ValueError for anything else."""
    value = literal_of(label)
    try:
        tests = _assertions(value) if isinstance(value, str) else _read(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f" ({error})"
    else:
        problem = ""
    if problem or not tests:
        raise ValueError(
            "the label must be tests: {inputs, outputs}, a list of {input, output}, or a list of"
            f" assertions; got {type(label).__name__} {str(label)[:80]!r}{problem}"
        )
    return tests


def _assertions(text: str) -> list[CodeTest]:
    """The assertions of a text, MBPP's, each behind the other statements before it."""
    tests = []
    before: list[str] = []
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"no Python: {error}") from error
    for node in body:
        if isinstance(node, ast.Assert):
            tests.append(CodeTest("\n".join([*before, ast.unparse(node)]), statement=True))
        else:
            before.append(ast.unparse(node))
    return tests


def _read(value: Any) -> list[CodeTest]:
    if isinstance(value, Mapping):
        if value.get("inputs") is None or value.get("outputs") is None:
            raise ValueError("a map of tests has inputs and outputs")
        inputs, outputs = (_listed(value[name], name) for name in ("inputs", "outputs"))
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
        name = value.get("fn_name") or None
        return [_pair(given, wanted, name) for given, wanted in zip(inputs, outputs)]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError("expected a map or a list")
    tests = []
    for one in value:
        if isinstance(one, str):
            tests.append(CodeTest(one, statement=True))
        else:
            metadata = one.get("metadata") or {}
            name = one.get("fn_name") or metadata.get("func_name") or None
            tests.append(_pair(one["input"], one["output"], name))
    return tests


def _listed(value: Any, name: str) -> list[Any]:
    """Return a list as it is; a text's characters or a map's keys are no list of tests."""
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
        # the result is JSON, too; else it may be a text that looks like it
        wanted = _decoded(wanted)
    return CodeTest(_listed(given, "the arguments of a call"), wanted, name)


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # a text without quotes
            return json.loads(value)
    return value


def _text(value: Any) -> str:
    # APPS has some as lists of lines
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# --- programs -------------------------------------------------------------------------------------


def program_of(test: CodeTest, code: str, token: str, **limits: Any) -> Program:
    """Return what to run; its output is for `passed`."""
    if test.function is None and not test.statement:
        return Program(code, stdin=test.given, **limits)
    task = {
        "name": test.function,
        "arguments": None if test.statement else test.given,
        "statement": test.given if test.statement else None,
        "prelude": _PRELUDE,
        "token": token,
    }
    files = {"solution.py": code.encode("utf-8", "replace")}
    return Program(_HARNESS, stdin=json.dumps(task), files=files, **limits)


def passed(test: CodeTest, output: str, token: str) -> bool:
    """Tell whether the output of a program that succeeded is right."""
    if test.function is None and not test.statement:
        return same_text(output, test.expected)
    _, found, result = output.rpartition("\n" + token)
    if not found:
        return False
    if test.statement:
        return True
    try:
        value = json.loads(result)
    except (ValueError, RecursionError):
        return False
    # APPS wraps results into lists; some write a result as its JSON beside arguments that are none
    results = (test.expected, _decoded(test.expected))
    return any(same_value(one, result) for one in (value, [value]) for result in results)


def same_text(output: str, expected: str) -> bool:
    """Compare line by line and word by word: white space and the last digits of decimals aside."""
    lines = [[line.split() for line in text.strip().splitlines()] for text in (output, expected)]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    return all(
        one == other or _close(one, other) for pair in zip(*lines) for one, other in zip(*pair)
    )


def _close(one: str, other: str) -> bool:
    try:
        # whole numbers must be equal in all digits, however they are written
        if not any(mark in other for mark in ".eE"):
            return Decimal(one) == Decimal(other)
        return math.isclose(float(one), float(other), rel_tol=1e-6, abs_tol=1e-9)
    except (ValueError, InvalidOperation):
        return False


def same_value(value: Any, expected: Any) -> bool:
    """Compare values of JSON; decimals may differ in their last digits."""
    if isinstance(expected, float) and isinstance(value, float | int):
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
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
    if isinstance(value, bool | int | float) and isinstance(expected, bool | int):
        return value == expected  # True is 1 and 2.0 is 2, as an assertion would say
    return type(value) is type(expected) and bool(value == expected)
