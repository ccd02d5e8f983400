"""Errors of a configuration, one line each: path, origin, what was given, what was expected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlcore.config.key_suggestions import unknown_key
from rlcore.config.secrets import MASK, is_secret, mask_text
from rlcore.config.yaml_settings import DEFAULT, Tree, find, origin
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


@dataclass(frozen=True)
class Problem:
    """An error or a note about the key `path`, dotted."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"

    def at(self, place: str) -> str:
        """Return the line to print, with the origin of the key unless that is the default."""
        return str(self) if place == DEFAULT else f"{self.path} ({place}): {self.message}"


def config_error(problems: Iterable[Problem], tree: Tree) -> ConfigError:
    """Return all problems as one error, one a line, each with the origin of its key."""
    return ConfigError("\n".join(p.at(origin(tree, tuple(p.path.split(".")))) for p in problems))


def invalid_values(error: ValidationError, tree: Tree) -> list[Problem]:
    """Return pydantic's findings in our words."""
    return [_problem(details, tree) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, tree: Tree) -> Problem:
    path = tuple(str(key) for key in details["loc"])
    dotted = ".".join(path)
    if details["type"] == "extra_forbidden":
        return Problem(dotted, unknown_key(path, details["input"]))
    expected = expected_by(details)
    if details["type"] == "missing":
        return Problem(dotted, f"missing: give it in a file or as {dotted}=VALUE")
    if isinstance(find(tree, path), dict) and details["type"] == "value_error":
        return Problem(dotted, expected)
    if details["type"] == "string_type" and isinstance(details["input"], bool):
        expected += " (put it in quotes)"
    given = MASK if path and is_secret(path) else mask_text(show(details["input"]))
    return Problem(dotted, f"got {given}, expected {expected}")


def expected_by(details: ErrorDetails) -> str:
    """Return what pydantic expected, in our words."""
    context = details.get("ctx", {})
    if details["type"] == "value_error":
        return str(context["error"]).removeprefix("expected ")
    template = EXPECTED.get(details["type"])
    return template.format(**context) if template is not None else details["msg"]


def show(value: Any) -> str:
    """Return the value as YAML users write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a map of keys"
    return repr(value)
