"""Declared fields of a `config.json`, and the check of a folder's values by their types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.errors import ModelError

NAME = "config.json"

# Marks a field without a default. As ANY it marks a `Field.only` that accepts every value.
REQUIRED: Any = type("Required", (), {"__repr__": lambda _: "REQUIRED"})()
ANY = REQUIRED

# No model has a larger size: a list with an entry for each layer would not fit into memory.
_LIMIT = 1 << 31

Kind = Literal[
    "size", "count", "number", "float", "scale", "flag", "text", "texts", "counts", "numbers", "map"
]


def _finite(value: Any) -> bool:
    """Whether a value is a finite number within the limit; a bool is not a number."""
    if type(value) is int:
        return abs(value) < _LIMIT
    return type(value) is float and math.isfinite(value)


def _list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(kind(item) for item in value)


_KINDS: dict[Kind, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a positive integer", lambda value: type(value) is int and 0 < value < _LIMIT),
    "count": ("an integer of at least 0", lambda value: type(value) is int and 0 <= value < _LIMIT),
    "number": ("a positive number", lambda value: _finite(value) and value > 0),
    "float": (
        "a positive number with a decimal point or an exponent",
        lambda value: type(value) is float and _finite(value) and value > 0,
    ),
    "scale": ("a number of at least 0", lambda value: _finite(value) and value >= 0),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("text", lambda value: isinstance(value, str)),
    "texts": ("a list of text", _list_of(lambda item: isinstance(item, str))),
    "counts": (
        "a list of integers of at least 0",
        _list_of(lambda item: type(item) is int and item >= 0),
    ),
    "numbers": ("a list of positive numbers", _list_of(lambda item: _finite(item) and item > 0)),
    "map": ("an object", lambda value: isinstance(value, dict)),
}


@dataclass(frozen=True)
class Field:
    """The type of a field, its default, and the only supported value, if there is just one."""

    kind: Kind
    default: Any = REQUIRED
    nullable: bool = False
    only: Any = ANY


def check_fields(
    folder: Path | str, config: Mapping[str, Any], fields: Mapping[str, Field], within: str = ""
) -> dict[str, Any]:
    """Return the declared fields of `config`, with defaults for missing ones.

    Args:
        within: the field of config.json that holds `config`, for messages.

    Raises ModelError for a value of another type, a null, or an unsupported value.
    """
    checked = {}
    for key, field in fields.items():
        value = config.get(key, field.default)
        expected, fits = _KINDS[field.kind]
        null_fits = value is None and field.nullable
        if value is REQUIRED or (key in config and not null_fits and not fits(value)):
            more = " or null" if field.nullable else ""
            raise refusal(folder, f"{within}{key}", config.get(key, REQUIRED), expected + more)
        if field.only is not ANY and not null_fits and value != field.only:
            supported = f"{field.only!r}, as no other value is converted"
            raise refusal(folder, f"{within}{key}", value, supported)
        checked[key] = value
    return checked


def refusal(folder: Path | str, key: str, got: object, expected: str) -> ModelError:
    """Return the error about a field of `config.json`."""
    given = "nothing" if got is REQUIRED else repr(got)
    shown = given if len(given) <= 200 else f"{given[:200]}..."
    return ModelError(f"{Path(folder) / NAME}: {key}: got {shown}, expected {expected}")
