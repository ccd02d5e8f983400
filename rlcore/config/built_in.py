"""The declarations of built-in estimators and policy losses, read without torch.

Importing them would import torch, so the literals of their decorators are read from the source.
Plugins are not here: they are imported and asked (`rlcore.launch.input_checks`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ALGORITHMS = Path(__file__).parents[1] / "algorithms"


@dataclass(frozen=True)
class Declared:
    """The arguments of a registration that checks and plans read."""

    needs: frozenset[str] = frozenset()
    shaped_rewards: bool = False
    compares_group: bool = False
    # a policy loss that looks at the whole optimizer step before it is split
    batch_stats: bool = False


@cache
def built_in_estimators() -> Mapping[str, Declared]:
    """Return every built-in estimator by its name."""
    return _read("estimators", "register_estimator")


@cache
def built_in_losses() -> Mapping[str, Declared]:
    """Return every built-in policy loss by its name."""
    return _read("losses", "register_policy_loss")


def _read(folder: str, decorator: str) -> dict[str, Declared]:
    found: dict[str, Declared] = {}
    for file in sorted((_ALGORITHMS / folder).glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                    found[ast.literal_eval(call.args[0])] = _declared(node, call)
    if not found:
        raise RuntimeError(f"{_ALGORITHMS / folder}: the source of the algorithms is missing")
    return found


def _declared(node: ast.ClassDef, call: ast.Call) -> Declared:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    needs = ast.literal_eval(given["needs"]) if "needs" in given else ()
    flags = {
        name: ast.literal_eval(given[name])
        for name in ("shaped_rewards", "compares_group")
        if name in given
    }
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return Declared(frozenset(needs), batch_stats="batch_stats" in methods, **flags)
