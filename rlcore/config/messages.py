"""Errors of a configuration, one line each: path, origin, the value, what was expected.

Unknown keys, which pydantic finds, are refused with a suggestion.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic_core import ErrorDetails

from rlcore.config.other_trainers import keys_like
from rlcore.config.schema import known_keys, section_at, sections
from rlcore.config.secrets import MASK, is_secret, mask_text
from rlcore.config.yaml_settings import DEFAULT, KeyPath, Tree, find, origin
from rlcore.errors import ConfigError

EXPECTED = {
    "missing": "a value",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a map of keys",
    "model_type": "a map of keys",
    "model_attributes_type": "a map of keys",
    "literal_error": "one of {expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
}


class ConfigIssue(NamedTuple):
    """An error or a warning about the key `path`, dotted."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"

    def at(self, where: str) -> str:
        """Return the line to print, with the origin of the key unless it is a default."""
        return str(self) if where == DEFAULT else f"{self.path} ({where}): {self.message}"


def config_error(issues: Iterable[ConfigIssue], tree: Tree) -> ConfigError:
    """Join issues into one error with a line for each, which has the origin of its key."""
    return ConfigError("\n".join(p.at(origin(tree, tuple(p.path.split(".")))) for p in issues))


def invalid_value(details: ErrorDetails, tree: Tree) -> ConfigIssue:
    """Convert one of pydantic's errors."""
    path = tuple(str(key) for key in details["loc"])
    dotted = ".".join(path)
    if details["type"] == "extra_forbidden":
        return ConfigIssue(dotted, unknown_key(path, details["input"]))
    expected = expected_by(details)
    if details["type"] == "missing":
        return ConfigIssue(dotted, f"missing: give it in a file or as {dotted}=VALUE")
    if isinstance(find(tree, path), dict) and details["type"] == "value_error":
        return ConfigIssue(dotted, expected)
    if details["type"] == "string_type" and isinstance(details["input"], bool):
        expected += " (put it in quotes)"
    given = MASK if path and is_secret(path) else mask_text(show(details["input"]))
    return ConfigIssue(dotted, f"got {given}, expected {expected}")


def expected_by(details: ErrorDetails) -> str:
    """Describe what pydantic expected."""
    context = details.get("ctx", {})
    if details["type"] == "value_error":
        return str(context["error"]).removeprefix("expected ")
    template = EXPECTED.get(details["type"])
    return template.format(**context) if template is not None else details["msg"]


def show(value: Any) -> str:
    """Format a value as users write it in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a map of keys"
    return repr(value)


# --- unknown keys -------------------------------------------------------------------------------


def unknown_key(path: KeyPath, value: Any = None) -> str:
    """Return the message about an unknown key.

    Args:
        value: the value of the key; the keys of a map are looked up one by one.
    """
    if "." in path[-1]:
        return "unknown key: in a file, nest the parts instead of joining them with dots"
    near = suggest(path) or ""
    if isinstance(value, dict) and not near:
        found = {inner: suggest(inner) for inner in _leaves(path, value)}
        if known := [f"{'.'.join(inner)} is {key} here" for inner, key in found.items() if key]:
            return f"unknown key; {', '.join(known)}"
    hint = f"; did you mean {near}?" if near else ""
    return f"unknown key {near}" if near.startswith("(") else f"unknown key{hint}"


def _leaves(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    if not isinstance(value, dict) or not value:
        yield path
        return
    for key, inner in value.items():
        yield from _leaves((*path, str(key)), inner)


def suggest(path: KeyPath) -> str | None:
    """Suggest a key, or say why there is none; None if no key is similar.

    Keys of the same section come first, then the counterparts of other trainers' keys.
    """

    def leaf(key: str) -> str:
        return key.rpartition(".")[2]

    def likeness(key: str) -> float:
        """Return the similarity of the last words; a common first section breaks ties."""
        alike = difflib.SequenceMatcher(None, path[-1], leaf(key)).ratio()
        return alike + 0.05 * (path[0] == key.split(".")[0])

    section = section_at(path[:-1])
    siblings = list(section.model_fields) if section is not None else []
    inside = [key for key in known_keys() if (key.split(".")[0], leaf(key)) == (path[0], path[-1])]
    for cutoff in (0.9, 0.75):
        if near := difflib.get_close_matches(path[-1], siblings, n=1, cutoff=cutoff):
            return ".".join((*path[:-1], near[0]))
        if len(inside) == 1:
            return inside[0]
        if keys := keys_like(path):
            return " or ".join(keys)
    candidates = [*known_keys(), *(".".join(p) for p in sections() if p)]
    nearest = max(candidates, key=likeness)
    return nearest if likeness(nearest) >= 0.75 else None
