"""Parts that the configuration names: built in, or the user's `package.module:name`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rlcore.errors import ConfigError
from rlcore.import_paths import NoSuchName, import_object


def load_object(name: str, known: Mapping[str, Any], *, key: str) -> Any:
    """Return `known[name]`, or the object at the import path `name`.

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
        found = import_object(name)
    except NoSuchName as error:
        raise ConfigError(f"{key}: {name!r}: {module_name} has no {attribute!r}") from error
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{key}: {name!r}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{key}: {name!r} is a {type(found).__name__}, expected something callable"
        )
    return found
