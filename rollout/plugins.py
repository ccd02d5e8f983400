"""Parts that the configuration names: built in, or the user's `package.module:name`."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from rlcore.errors import ConfigError, RolloutFailed
from rlcore.import_paths import NoSuchName, import_object

_ROOT = Path(__file__).parents[1]
_NOT_THE_USERS = (  # files of rlcore, of Python and of packages
    "<",
    *(str(_ROOT / name) + os.sep for name in ("rlcore", "rollout", "backends")),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)


def load_object(name: str, known: Mapping[str, Any], *, key: str) -> Any:
    """Return `known[name]`, or the object at the import path `name`.

    Raises:
        ConfigError: neither; names the configuration `key` and the nearest known name.
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
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(
            f"{key}: {name!r}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{key}: {name!r} is a {type(found).__name__}, expected something callable"
        )
    return found


def unknown(name: str, known: Iterable[str]) -> str:
    """Say that a name is none of those known, and which is near."""
    near = difflib.get_close_matches(name, known := sorted(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{name!r} is unknown{hint} (known: {', '.join([*known, 'package.module:name'])})"


def place_of(function: Any, error: BaseException | None = None) -> str:
    """` (file:line in name)` of a function, or of its line that raised; empty where unknown."""
    code = _code(function)
    if code is None:
        return ""
    line = code.co_firstlineno
    frames = traceback.extract_tb(error.__traceback__) if error is not None else ()
    name = code.co_name
    for frame in frames:
        if frame.filename == code.co_filename and frame.lineno is not None:
            line = frame.lineno
            name = frame.name
    path = os.path.relpath(code.co_filename)
    return f" ({code.co_filename if path.startswith('..') else path}:{line} in {name})"


def _code(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = getattr(function, "__func__", None) or call_method(type(function))
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def call_method(found: type) -> Callable[..., Any] | None:
    """Return the function that runs when an instance of a class is called, if it has one."""
    # getattr would find the metaclass's for a class without one
    return next(
        (vars(base)["__call__"] for base in found.__mro__ if "__call__" in vars(base)), None
    )


def place_of_error(error: BaseException) -> str:
    """` (file:line in name)` of the user's line that raised, or of the last line where none did."""
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return _shown(frames)


def failure_of(error: BaseException) -> RolloutFailed:
    """Return what an exception of the user's code makes of its rollout."""
    kind = "error"
    if isinstance(error, SystemExit | KeyboardInterrupt):
        kind = "exit"
    elif isinstance(error, TimeoutError | asyncio.TimeoutError):
        kind = "timeout"
    return RolloutFailed(kind, f"{type(error).__name__}: {error}", place_of_error(error))


def place_of_task(task: asyncio.Task[Any]) -> str:
    """` (file:line in name)` of the user's line at which a task waits; empty where unknown."""
    frames = []
    waits: Any = task.get_coro()
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        waits = waits.cr_await
    return _shown(frames)


def _shown(frames: Sequence[tuple[str, int, str]]) -> str:
    """Show the innermost frame of the user's code, or the innermost of all."""
    own = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)]
    if not (own or frames):
        return ""
    file, line, name = (own or frames)[-1]
    path = os.path.relpath(file)
    return f" ({file if path.startswith('..') else path}:{line} in {name})"
