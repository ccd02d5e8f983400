"""The keys of a configuration that hold paths, and the checks of these paths."""

from __future__ import annotations

import os
import shutil
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rlcore.config.schema import ANY, field_section, sections
from rlcore.config.sections.base import LeadsTo
from rlcore.config.sections.root import Config
from rlcore.config.yaml_settings import KeyPath
from rlcore.errors import ConfigError


@cache
def path_keys() -> dict[KeyPath, LeadsTo]:
    """Return every key that holds a path, or a list of paths, and what the path must lead to."""
    return {
        (*path, name, *([ANY] if typing.get_origin(field.annotation) is dict else [])): leads_to
        for path, section in sections().items()
        for name, field in section.model_fields.items()
        if field_section(field.annotation)[0] is None
        and (leads_to := _marker([*field.metadata, field.annotation])) is not None
    }


def given_paths(config: Config) -> Iterator[tuple[str, LeadsTo, str]]:
    """Yield (key, what the path must lead to, path) for every path of a configuration."""
    for pattern, leads_to in path_keys().items():
        for key, value in _values(config, pattern):
            for path in [value] if isinstance(value, str) else value or ():
                yield ".".join(key), leads_to, path


def check_paths(config: Config, *, unread: tuple[str, ...] = ()) -> None:
    """Refuse paths that do not lead to what their key needs.

    Args:
        unread: sections that this run does not read.

    Raises:
        ConfigError: one line for each wrong path, starting with its key.
    """
    issues = [
        f"{key}: {problem}"
        for key, leads_to, path in given_paths(config)
        if leads_to.kind != "rows" and key.partition(".")[0] not in unread
        and (problem := path_error(path, leads_to))
    ]  # fmt: skip
    if issues:
        raise ConfigError("\n".join(issues))


def path_error(given: str, leads_to: LeadsTo) -> str | None:
    """Explain why a path does not lead to `leads_to`; None if it does, or may."""
    path = Path(given)
    kind = leads_to.kind
    expected = f"expected {leads_to.expected}"
    if kind == "output":
        while not path.exists() and path != path.parent:
            path = path.parent
        if not path.is_dir():
            return f"{path} is a file; {expected}"
        if not os.access(path, os.W_OK | os.X_OK):
            return f"{path} may not be written to by the user who starts this; {expected}"
        return None
    if kind == "program" and (found := shutil.which(given)):
        path = Path(found)
    if kind == "checkpoint":
        # `find_checkpoint` checks the step.
        path, _ = split_reference(path)
    if not path.exists():
        return f"{path} does not exist; {expected}"
    is_folder = path.is_dir() if kind == "list" else kind in ("folder", "checkpoint")
    if path.is_dir() != is_folder:
        return f"{path} is a {'file' if is_folder else 'folder'}; {expected}"
    if not os.access(path, os.R_OK | os.X_OK if is_folder else os.R_OK):
        return f"{path} may not be read by the user who starts this; {expected}"
    if not (any(path.iterdir()) if is_folder else path.stat().st_size):
        return f"{path} is empty; {expected}"
    if kind == "program" and not os.access(path, os.X_OK):
        return f"{path} may not be executed; {expected}"
    return None


def split_reference(path: Path) -> tuple[Path, str]:
    """Split RUN@STEP or RUN@best into the run's folder and the suffix, "" if there is none."""
    run, at, which = str(path).rpartition("@")
    is_reference = at and (which == "best" or which.isdecimal()) and not path.exists()
    return (Path(run), which) if is_reference else (path, "")


def _marker(parts: list[Any]) -> LeadsTo | None:
    """Find a marker among annotations and inside them."""
    for part in parts:
        if isinstance(part, LeadsTo):
            return part
        if (found := _marker(list(typing.get_args(part)))) is not None:
            return found
    return None


def _values(section: Any, pattern: KeyPath, key: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (key, value) for the values of a configuration at a pattern."""
    if section is None or not pattern:
        yield key, section
        return
    name, *rest = pattern
    if name == ANY:
        for entry, inner in section.items():
            yield from _values(inner, tuple(rest), (*key, entry))
    else:
        yield from _values(getattr(section, name), tuple(rest), (*key, name))
