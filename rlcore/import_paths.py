"""Import paths `package.module:name`, and locations of errors in user code.

Uses the standard library alone, since every layer imports this file.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_ROOT = Path(__file__).parents[1]
# Path prefixes of rlcore, of Python and of installed packages; other files are the user's.
_NOT_USER_CODE = (
    "<",
    *(str(_ROOT / name) + os.sep for name in ("rlcore", "rollout", "backends")),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)


class NoSuchName(LookupError):
    """The module of an import path was imported, but lacks the name."""

    def __init__(self, module: ModuleType, message: str) -> None:
        super().__init__(message)
        self.module = module


def import_object(path: str) -> Any:
    """Import `package.module:name`; the name may have dots.

    Raises:
        NoSuchName: the module has no such name.
        Exception: whatever importing the module raised.
    """
    module_name, _, name = path.partition(":")
    module = importlib.import_module(module_name)
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        raise NoSuchName(module, str(error)) from error


def place_of(function: Any, error: BaseException | None = None) -> str:
    """Return ` (file:line in name)` of a function, or of its line that raised; "" if unknown."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = getattr(function, "__func__", None) or call_method(type(function))
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    line = code.co_firstlineno
    frames = traceback.extract_tb(error.__traceback__) if error is not None else ()
    name = code.co_name
    for frame in frames:
        if frame.filename == code.co_filename and frame.lineno is not None:
            line = frame.lineno
            name = frame.name
    return _place(code.co_filename, line, name)


def call_method(found: type) -> Callable[..., Any] | None:
    """Return the function that runs when an instance of a class is called, if it has one."""
    # For a class without `__call__`, getattr would return the metaclass's.
    return next(
        (vars(base)["__call__"] for base in found.__mro__ if "__call__" in vars(base)), None
    )


def place_of_error(error: BaseException) -> str:
    """Return ` (file:line in name)` of the innermost line of user code, or else of any code."""
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return shown_place(frames)


def shown_place(frames: Sequence[tuple[str, int, str]]) -> str:
    """Format the innermost frame of the user's code, or else the innermost of all frames."""
    own = [frame for frame in frames if not frame[0].startswith(_NOT_USER_CODE)]
    if not (own or frames):
        return ""
    return _place(*(own or frames)[-1])


def _place(file: str, line: int, name: str) -> str:
    path = os.path.relpath(file)
    return f" ({file if path.startswith('..') else path}:{line} in {name})"
