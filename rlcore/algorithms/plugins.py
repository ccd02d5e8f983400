"""Plugins of any kind: import one by its path, and check the keywords of its constructor."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from rlcore.algorithms.errors import KeywordError, UnknownNameError, known_names
from rlcore.import_paths import NoSuchName, import_object

REQUIRED = inspect.Parameter.empty  # marks a keyword without a default


def import_plugin(path: str, kind: str) -> Any:
    """Import `package.module:Name`; raise `UnknownNameError` where it does not exist."""
    module_name, _, qualname = path.partition(":")
    if not module_name or not qualname:
        raise UnknownNameError(f"{kind} {path!r}: expected 'package.module:Name'")
    try:
        return import_object(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            # The module exists; a module that it imports does not.
            raise
        raise UnknownNameError(
            f"{kind} {path!r}: no module {error.name!r} (is it on PYTHONPATH?)"
        ) from error
    except NoSuchName as error:
        public = [
            name
            for name, value in vars(error.module).items()
            if getattr(value, "__module__", None) == error.module.__name__
            and not name.startswith("_")
        ]
        raise UnknownNameError(
            f"{kind} {path!r}: {error}; {known_names(qualname, public)}"
        ) from error


@dataclass(frozen=True)
class Keyword:
    """One keyword of a constructor; its default is `REQUIRED` where it has none."""

    name: str
    annotation: Any
    default: Any

    def __str__(self) -> str:
        annotation = "" if self.annotation is REQUIRED else f": {_annotation_name(self.annotation)}"
        return f"{self.name}{annotation}" + (
            "" if self.default is REQUIRED else f" = {self.default!r}"
        )


def constructor_keywords(factory: Callable[..., Any], owner: str) -> dict[str, Keyword]:
    """Return the keywords of `factory`, in order."""
    target = factory
    if isinstance(factory, type):
        target = factory.__init__ if factory.__init__ is not object.__init__ else factory.__new__  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(target)
    # Annotations that cannot be resolved are not checked.
    except (NameError, TypeError, AttributeError):
        hints = {}
    keywords: dict[str, Keyword] = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
            parameter.POSITIONAL_ONLY,
        ):
            raise KeywordError(
                f"{owner}: its constructor takes {parameter}; name every keyword instead, or a"
                " misspelt config key would be swallowed"
            )
        annotation = hints.get(parameter.name, REQUIRED)
        keywords[parameter.name] = Keyword(parameter.name, annotation, parameter.default)
    return keywords


def check_keywords(owner: str, keywords: Mapping[str, Keyword], given: Mapping[str, Any]) -> None:
    """Raise `KeywordError` for unknown names, wrong types and missing keywords."""
    accepted = f"accepted: {', '.join(map(str, keywords.values())) or 'no keyword at all'}"
    for name, value in given.items():
        if name not in keywords:
            raise KeywordError(
                f"{owner}: unknown keyword {name!r}; {known_names(name, keywords)}; {accepted}"
            )
        annotation = keywords[name].annotation
        if not _fits(value, annotation):
            raise KeywordError(
                f"{owner}: keyword {name!r} expected {_annotation_name(annotation)}, "
                f"got {value!r} ({type(value).__name__}); {accepted}"
            )
    missing = [
        name
        for name, keyword in keywords.items()
        if keyword.default is REQUIRED and name not in given
    ]
    if missing:
        raise KeywordError(f"{owner}: missing keyword {', '.join(map(repr, missing))}; {accepted}")


def _fits(value: object, annotation: Any) -> bool:
    """Return whether `value` fits `annotation`.

    A float takes an int, a bool is neither, and the items of containers are not checked.
    """
    if annotation is REQUIRED or annotation is Any:
        return True
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(annotation))
    if origin is Literal:
        return any(
            type(value) is type(option) and value == option for option in get_args(annotation)
        )
    if annotation is None or annotation is type(None):
        return value is None
    if annotation in (int, float):
        numbers = (int,) if annotation is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    kind = origin or annotation
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _annotation_name(annotation: Any) -> str:
    return (
        annotation.__name__
        if isinstance(annotation, type)
        else str(annotation).replace("typing.", "")
    )
