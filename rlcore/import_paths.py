"""Import paths `package.module:name`, locations of errors in user code, and torch on demand.

Uses the standard library alone, since every layer imports this file.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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


def location_of(function: Any, error: BaseException | None = None) -> str:
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


def error_location(error: BaseException) -> str:
    """Return ` (file:line in name)` of the innermost line of user code, or else of any code."""
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return frame_location(frames)


def frame_location(frames: Sequence[tuple[str, int, str]]) -> str:
    """Format the innermost frame of the user's code, or else the innermost of all frames."""
    own = [frame for frame in frames if not frame[0].startswith(_NOT_USER_CODE)]
    if not (own or frames):
        return ""
    return _place(*(own or frames)[-1])


def _place(file: str, line: int, name: str) -> str:
    path = os.path.relpath(file)
    return f" ({file if path.startswith('..') else path}:{line} in {name})"


# --- torch on demand ------------------------------------------------------------------------------


class _Lazy(ModuleType):
    """A stub for torch in `sys.modules` that loads torch at the first attribute or submodule."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get("torch") is self:
            del sys.modules["torch"]
        return getattr(importlib.import_module("torch"), name)


class _Submodules(MetaPathFinder, Loader):
    """Loads torch before one of its submodules is imported, then returns the loaded submodule."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of torch before other finders load it a second time."""
        if not (fullname.startswith("torch.") and isinstance(sys.modules.get("torch"), _Lazy)):
            return None
        del sys.modules["torch"]
        importlib.import_module("torch")
        if fullname not in sys.modules:
            return importlib.util.find_spec(fullname)
        module = sys.modules[fullname]
        own = module.__spec__
        # Python would follow it, and load the module again.
        module.__spec__ = None
        return ModuleSpec(fullname, self, loader_state=own)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that torch loaded."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own specification."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def import_torch_lazily() -> bool:
    """Make `import torch` free until torch is used. Returns False if torch is not installed.

    Loading torch costs two seconds of CPU. Commands that check configurations import modules that
    import torch, but seldom use torch.
    """
    if "torch" not in sys.modules:
        spec = importlib.util.find_spec("torch")
        if spec is None:
            return False
        lazy = _Lazy("torch")
        # Packages call `find_spec` to see whether torch is installed.
        lazy.__spec__ = spec
        sys.modules["torch"] = lazy
        sys.meta_path.insert(0, _Submodules())
    return True
