"""Splits assertions, as MBPP and HumanEval write them, into tests.

A test is executed apart from the solution, so every name in it belongs to Python, the test, or the
solution. Only the solution's names are requested from the solution: with its own `len` or `isclose`
it could decide what is equal.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from rollout.rewards.graders.places import literal_of

# Names that LeetCode-style solutions assume; last the name that `math` hides, `pow`.
PRELUDE = (
    *("typing", "collections", "heapq", "bisect", "itertools", "functools", "math"),
    "builtins",
)
MORE = ("copy", "datetime", "decimal", "fractions")
ALIASES = {"np": "numpy", "pd": "pandas"}
# MBPP columns: statements and import lines that precede every assertion
SETUP = ("test_imports", "test_setup_code")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


# an import, or a function with all its indented lines
_BLOCKS = re.compile(
    r"^(?:from [\w.]+ import .+|import .+|(?:@.+\n)*def \w+\(.*(?:\n(?:[ \t].*)?)*)", re.MULTILINE
)


@dataclass(frozen=True)
class Statement:
    """A text that must not raise, the names that it takes from the solution, and its imports.

    `prelude` is executed before the solution.
    """

    text: str
    names: tuple[str, ...]
    imports: str = ""
    prelude: str = ""


def statements_of(text: str, row: Mapping[str, Any]) -> list[Statement]:
    """Make a test of each assertion of a text, preceded by the other statements before it.

    Later statements that also assert, such as a loop or `check(function)`, form one more test.
    Raises ValueError for text that is no test.
    """
    body, entry, prelude = _parsed(text, row)
    tests: list[Statement] = []
    before: list[ast.stmt] = []
    last = 0
    for at, node in enumerate(body):
        if isinstance(node, ast.Assert):
            tests.append(_statement([*before, node], entry, prelude))
            last = at + 1
        else:
            before.append(node)
    acts = any(not isinstance(node, DEFINITIONS) for node in body[last:])
    if acts and any(isinstance(inner, ast.Assert) for node in before for inner in ast.walk(node)):
        tests.append(_statement(before, entry, prelude))
    return tests


def statement_of(text: str, row: Mapping[str, Any]) -> Statement:
    """Make one test of a text. Raises ValueError for text that is no test."""
    return _statement(*_parsed(text, row))


def _parsed(text: str, row: Mapping[str, Any]) -> tuple[list[ast.stmt], str, str]:
    """The statements after the row's setup, and the data of HumanEval's other columns.

    Those are the function that `check` tests, and the prompt's definitions for test and solution.
    """
    body = [*_setup(row), *_body(text, "")]
    wanted = {name for one in body for node in ast.walk(one) for name in _wanted(node)}
    defined = {name for one in body for name in _bound(one)}
    if "check" not in defined or "check" in wanted:
        return body, "", ""
    entry = row.get("entry_point")
    if not isinstance(entry, str):
        raise ValueError(
            "check(candidate) is defined and never called: end the text with check(FUNCTION), or"
            " have the function's name in the column entry_point"
        )
    given = _given(row.get("prompt"), entry)
    helpers = [node for node in given if set(_bound(node)) & wanted - defined]
    prelude = "\n".join(map(ast.unparse, given))
    return [*helpers, *body, *ast.parse(f"check({entry})").body], entry, prelude


def _body(text: str, where: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"{where}no Python: {error}") from error


def _setup(row: Mapping[str, Any]) -> list[ast.stmt]:
    """The statements of the columns that accompany a list of assertions."""
    found = []
    for column in SETUP:
        value = literal_of(row.get(column))
        lines = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(line, str) for line in lines):
            raise ValueError(f"the column {column} must be text, or a list of it; got {value!r}")
        found += _body("\n".join(lines), f"the column {column} is ")
    return found


def _given(prompt: Any, entry: str) -> list[ast.stmt]:
    """The imports and functions in a prompt's code before the function to write.

    HumanEval's tests and solutions may call them. The code may be part of a conversation.
    """
    before = prompt.partition(f"def {entry}(") if isinstance(prompt, str) else ("", "", "")
    found: list[ast.stmt] = []
    for block in _BLOCKS.findall(before[0]) if before[1] else []:
        # recovery: a sentence that begins with "import" is not code
        with suppress(SyntaxError):
            found += ast.parse(block).body
    return found


def _statement(body: Sequence[ast.stmt], entry: str, prelude: str = "") -> Statement:
    text = "\n".join(map(ast.unparse, body))
    nodes = [node for statement in body for node in ast.walk(statement)]
    bound = {name for node in nodes for name in _bound(node)}
    # in the order of the text
    free = dict.fromkeys(name for node in nodes for name in _wanted(node) if name not in bound)
    modules = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    imports = {name: _import_of(name, name in modules) for name in free if name != entry}
    names = [name for name in free if imports.get(name) is None]
    if not names:
        # MBPP has functions called `sum`: take the first call that contains no other call
        calls = [node for node in nodes if isinstance(node, ast.Call) and _is_innermost(node)]
        found = [c.func.id for c in calls if isinstance(c.func, ast.Name) and c.func.id in imports]
        names = found[:1]
    if not names:
        raise ValueError(f"nothing of a solution is tested by {text[:80]!r}")
    lines = [line for name, line in imports.items() if line and name not in names]
    return Statement(text, tuple(names), "\n".join(lines), prelude)


def _is_innermost(call: ast.Call) -> bool:
    return sum(isinstance(node, ast.Call) for node in ast.walk(call)) == 1


def _wanted(node: ast.AST) -> list[str]:
    """The names that this node uses."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.ImportFrom) and node.module == "solution":
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name == "solution"]
    return []


def _bound(node: ast.AST) -> list[str]:
    """The names that this node binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.ClassDef(name=name) | ast.arg(arg=name):
            return [name]
        case ast.ExceptHandler(name=str(name)):
            return [name]
        case ast.Import(names=aliases) if aliases[0].name != "solution":
            return [(alias.asname or alias.name).partition(".")[0] for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases) if module != "solution":
            return [alias.asname or alias.name for alias in aliases]
        case ast.ImportFrom(names=aliases):
            return [alias.asname for alias in aliases if alias.asname]
    return []


def _import_of(name: str, is_module: bool) -> str | None:
    """The import that gives a test a name of Python's; empty for a builtin, None if unknown."""
    if hasattr(builtins, name):
        return ""
    if is_module and name in ALIASES:
        return f"import {ALIASES[name]} as {name}"
    if is_module and name in sys.stdlib_module_names:
        return f"import {name}"
    module = _modules_of_names().get(name)
    return None if module is None else f"from {module} import {name}"


@cache
def _modules_of_names() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for module in (*PRELUDE, *MORE):
        known = importlib.import_module(module)
        public = getattr(known, "__all__", [name for name in dir(known) if name[0] != "_"])
        found |= dict.fromkeys(public, module)
    return found
