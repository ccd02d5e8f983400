"""`config.json` of a Hugging Face folder: reading it, and checking its fields by declared types."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.errors import ModelError

NAME = "config.json"

# The value of a field that has no default, and of `Field.only` where any value is accepted.
REQUIRED: Any = type("Required", (), {"__repr__": lambda _: "REQUIRED"})()
ANY = REQUIRED

# No model has a larger size; a list with a place for each layer would not fit into memory.
_LIMIT = 1 << 31

Kind = Literal[
    "size", "count", "number", "float", "scale", "flag", "text", "texts", "counts", "map"
]


def _finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold; a bool is none."""
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
    "map": ("an object", lambda value: isinstance(value, dict)),
}


@dataclass(frozen=True)
class Field:
    """The type of a field, its value where it is left out, and the only value that is supported."""

    kind: Kind
    default: Any = REQUIRED
    nullable: bool = False
    only: Any = ANY


def read_config(folder: Path | str) -> dict[str, Any]:
    """Read `config.json` of a folder. Raises ModelError unless it is there and holds an object."""
    folder = Path(folder)
    path = folder / NAME
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; expected a local Hugging Face folder (config.json,"
            " *.safetensors)"
        )
    if not path.is_file():
        raise ModelError(f"{folder}: no config.json; expected a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    # A ValueError is also raised for bytes that are no UTF-8, and numbers of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: got a JSON {type(config).__name__}, expected an object")
    return config


def check_fields(
    folder: Path | str, config: Mapping[str, Any], fields: Mapping[str, Field], within: str = ""
) -> dict[str, Any]:
    """Return the declared fields of `config`, those that are left out with their defaults.

    Args:
        within: the field of config.json that holds `config`, for messages.

    Raises ModelError for a value of another type, for null, or for one that is not supported.
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


def text_model_size(folder: Path | str, key: str) -> int | None:
    """Read a size from `config.json`, or from its `text_config`; None where neither has it.

    Raises ModelError like `read_config`, and for what is no positive integer.
    """
    config = read_config(folder)
    fields = {
        key: Field("size", None, nullable=True),
        "text_config": Field("map", {}, nullable=True),
    }
    found = check_fields(folder, config, fields)
    within = found["text_config"] or {}
    inner = check_fields(folder, within, {key: fields[key]}, "text_config.")
    size: int | None = found[key] if found[key] is not None else inner[key]
    return size
