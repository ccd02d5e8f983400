"""The loader of import paths `package.module:name`. Standard library alone: every layer uses it."""

from __future__ import annotations

import importlib
from operator import attrgetter
from types import ModuleType
from typing import Any


class NoSuchName(LookupError):
    """The module of an import path was imported, but the name is not in it."""

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
