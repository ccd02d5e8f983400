"""Every key of the configuration with its type, default and meaning, read from the sections."""

from __future__ import annotations

import ast
import inspect
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from rlcore.config.schema import is_entry, listed, may_be_null, sections
from rlcore.config.sections.base import Plugin, Section

_TYPES = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "anything"}
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_INTRODUCTION = """# Configuration reference

Written by `rlcore config --markdown`; do not edit. Every key, its type, its default and its
meaning. `NAME` is a name of your own. How files, overrides and sections work together:
[configuration](configuration.md).
"""


# Where the keywords of a section's plugins are listed.
_KEYWORDS = {
    "algorithm": "`rlcore config --algorithms`",
    "data": "[data](data.md#prompts-that-are-worth-it-now)",
    "rollout": "[workflows](workflows.md)",
    "evaluation": "[workflows](workflows.md)",
}


class Key(NamedTuple):
    """One key that holds a value, as text."""

    path: str
    type: str
    default: str
    meaning: str


def keys(section: type[Section], path: tuple[str, ...]) -> list[Key]:
    """Return the keys of `section` that are listed at `path`; inner sections are left out."""
    meanings = _meanings(section)
    found = []
    for name in listed()[path][0]:
        field = section.model_fields[name]
        default = "required"
        if not field.is_required():
            default = f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        kind, null, _ = _type_name(field.annotation).partition(" or null")
        kind += _limits(field.metadata) + null
        found.append(Key(".".join((*path, name)), kind, default, meanings[name]))
    return found


def list_keys() -> Iterator[str]:
    """Yield one line per key, for `rlcore config`."""
    found = [key for path in listed() for key in keys(sections()[path], path)]
    width = max(len(key.path) for key in found)
    for key in found:
        yield f"{key.path.ljust(width)}  {key.meaning} ({key.type}; {key.default})"


def reference_page() -> str:
    """Return docs/configuration-reference.md, for `rlcore config --markdown`."""
    return "\n".join([_INTRODUCTION, *(_part(path, sections()[path]) for path in listed() if path)])


def _part(path: tuple[str, ...], section: type[Section]) -> str:
    lines = [f"## {'.'.join(path)}", "", inspect.cleandoc(section.__doc__ or "")]
    if may_be_null(path):
        lines[-1] += " Default: null, no such section."
    if is_entry(path):
        lines[-1] += " `NAME: null` removes one that an earlier file gave."
    if issubclass(section, Plugin) and not section.keywords:
        lines[-1] += f" Keywords: {_KEYWORDS[path[0]]}."
    if (home := listed()[path][1]) is not None:
        lines[-1] += _shared(section, path, home)
    if rows := keys(section, path):
        lines += ["", "| key | type; default | meaning |", "|---|---|---|"]
    for key in rows:
        # A default of null says that null is a value.
        kind = key.type.removesuffix(" or null") if key.default == "`null`" else key.type
        lines.append(f"| `{key.path}` | {kind}; {key.default} | {key.meaning} |")
    return "\n".join(lines) + "\n"


def _shared(section: type[Section], path: tuple[str, ...], home: tuple[str, ...]) -> str:
    """Name the keys of a section that are listed at `home`."""
    above = ".".join(home)
    if section is sections()[home]:
        return f" Its keys are those of `{above}`."
    own = listed()[path][0]
    names = [name for name in section.model_fields if name in listed()[home][0] and name not in own]
    return f" Also, as in `{above}`: {', '.join(f'`{name}`' for name in names)}."


def _meanings(section: type[Section]) -> dict[str, str]:
    """Read the docstring after each field, including inherited fields."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if not issubclass(owner, Section):
            continue
        node = ast.parse(inspect.getsource(owner)).body[0]
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        first, *metadata = arguments
        inner = [limit for item in metadata for limit in getattr(item, "metadata", [item])]
        return _type_name(first) + _limits(inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(item) for item in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "map"
    return "null" if annotation is type(None) else _TYPES[annotation]


def _limits(metadata: list[Any]) -> str:
    limits = [
        f" {sign} {getattr(item, name):g}"
        for item in metadata
        for name, sign in _LIMITS.items()
        if hasattr(item, name)
    ]
    return ",".join(limits)
