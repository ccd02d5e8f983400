"""The keys of a configuration, read from the sections."""

from __future__ import annotations

import typing
from functools import cache
from types import UnionType
from typing import Any, Union

from rlcore.config.sections.base import Entry, Plugin, Section
from rlcore.config.sections.root import Config
from rlcore.config.yaml_settings import KeyPath

ANY = "NAME"  # placeholder for the free key of a map of sections: reward.parts.NAME.weight


def field_section(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section that a field holds, or None, and whether it holds a map of sections."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (Union, UnionType):
        found = [field_section(argument) for argument in arguments if argument is not type(None)]
        return next((item for item in found if item[0] is not None), (None, False))
    if origin is dict:
        return field_section(arguments[1])[0], True
    return None, False


@cache
def sections() -> dict[KeyPath, type[Section]]:
    """Return every section by its path, in the order declared."""
    found: dict[KeyPath, type[Section]] = {}

    def walk(section: type[Section], path: KeyPath) -> None:
        found[path] = section
        for name, field in section.model_fields.items():
            inner, named = field_section(field.annotation)
            if inner is not None:
                walk(inner, (*path, name, ANY) if named else (*path, name))

    walk(Config, ())
    return found


@cache
def known_keys() -> tuple[str, ...]:
    """Return every declared key that holds a value, dotted."""
    return tuple(
        ".".join((*path, name))
        for path, section in sections().items()
        for name, field in section.model_fields.items()
        if field_section(field.annotation)[0] is None
    )


@cache
def listed() -> dict[KeyPath, tuple[list[str], KeyPath | None]]:
    """Return the keys to list under each section, and the path at which its other keys are listed.

    A class with several paths, and a base that several classes share, is listed once.
    """
    found: dict[KeyPath, tuple[list[str], KeyPath | None]] = {}
    homes: dict[type[Section], KeyPath] = {}
    repeated: list[KeyPath] = []
    for path, section in sections().items():
        if any(path[: len(above)] == above for above in repeated):
            continue
        bases = [base for base in section.__mro__ if issubclass(base, Section)]
        bases = [base for base in bases if base not in (Section, Plugin, Entry)]
        home = next((homes[base] for base in bases if base in homes), None)
        old = {name for base in bases if base in homes for name in base.__annotations__}
        names = [
            name
            for name, field in section.model_fields.items()
            if name not in old and field_section(field.annotation)[0] is None
        ]
        found[path] = (names, home)
        if section in homes:
            repeated.append(path)
        for base in bases:
            homes.setdefault(base, path)
    return found


def section_at(path: KeyPath) -> type[Section] | None:
    """Return the section at `path`, in which any key of a map matches `NAME`."""
    for pattern, section in sections().items():
        if len(pattern) == len(path) and all(p in (ANY, key) for p, key in zip(pattern, path)):
            return section
    return None


def is_entry(path: KeyPath) -> bool:
    """Whether `path` is an entry of a map of sections, as reward.parts.NAME."""
    return section_at(path) is not None and section_at(path[:-1]) is None


def may_be_null(path: KeyPath) -> bool:
    """Whether null at `path` is a value: for optional sections, and values of free maps."""
    parent = section_at(path[:-1])
    if parent is None:
        return not is_entry(path)
    field = parent.model_fields.get(path[-1])
    return field is not None and type(None) in typing.get_args(field.annotation)
