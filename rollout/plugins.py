"""Objects that the configuration names: built in, or the user's `package.module:name`."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rlcore.errors import ConfigError, RolloutFailed
from rlcore.import_paths import NoSuchName, error_location, frame_location, import_object


def load_object(name: str, known: Mapping[str, Any], *, key: str) -> Any:
    """Return `known[name]`, or the object at the import path `name`.

    Raises:
        ConfigError: there is neither; names the configuration `key` and the nearest known name.
    """
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{key}: {unknown(name, known)}")
    try:
        found = import_object(name)
    except NoSuchName as error:
        raise ConfigError(f"{key}: {name!r}: {module_name} has no {attribute!r}") from error
    except (Exception, SystemExit) as error:
        # the import of a user's module may raise anything
        raise ConfigError(
            f"{key}: {name!r}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{key}: {name!r} is a {type(found).__name__}, expected something callable"
        )
    return found


def unknown(name: str, known: Iterable[str]) -> str:
    """The message that a name is unknown, with the nearest known name."""
    near = difflib.get_close_matches(name, known := sorted(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{name!r} is unknown{hint} (known: {', '.join([*known, 'package.module:name'])})"


def failure_of(error: BaseException) -> RolloutFailed:
    """The RolloutFailed for an exception of the user's code."""
    kind = "error"
    if isinstance(error, SystemExit | KeyboardInterrupt):
        kind = "exit"
    elif isinstance(error, TimeoutError | asyncio.TimeoutError):
        kind = "timeout"
    return RolloutFailed(kind, f"{type(error).__name__}: {error}", error_location(error))


def task_location(task: asyncio.Task[Any]) -> str:
    """` (file:line in name)` of the user's line at which a task waits; empty where unknown."""
    frames = []
    waits: Any = task.get_coro()
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        waits = waits.cr_await
    return frame_location(frames)
