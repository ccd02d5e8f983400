"""Parts that the configuration names: one of ours, or `package.module:name` of the user's."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from rlcore.errors import ConfigError


def load_object(name: str, known: Mapping[str, Any], *, key: str) -> Any:
    """`known[name]`, or the object at the import path `name`.

    Raises:
        ConfigError: neither; names the configuration `key` and the nearest known name.
    """
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{key}: {name!r} is unknown{hint} (known:"
            f" {', '.join([*sorted(known), 'package.module:name'])})"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{key}: {name!r}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}: {name!r}: {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"{key}: {name!r} is a {type(found).__name__}, expected something callable"
        )
    return found
