"""Words the refusal of a key that no section declares, and finds the key that was meant.

pydantic finds such a key: `sections.base.Section` forbids them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from rlcore.config.other_trainers import keys_like
from rlcore.config.schema import known_keys, section_at, sections
from rlcore.config.yaml_settings import KeyPath


def unknown_key(path: KeyPath, value: Any = None) -> str:
    """Return the message about an unknown key.

    Args:
        value: what was given; the keys of a map are looked up one by one.
    """
    if "." in path[-1]:
        return "unknown key: in a file, nest the parts instead of joining them with dots"
    near = suggest(path) or ""
    if isinstance(value, dict) and not near:
        found = {inner: suggest(inner) for inner in _leaves(path, value)}
        if known := [f"{'.'.join(inner)} is {key} here" for inner, key in found.items() if key]:
            return f"unknown key; {', '.join(known)}"
    if near.startswith("("):
        return f"unknown key {near}"
    return "unknown key" + (f"; did you mean {near}?" if near else "")


def _leaves(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    if not isinstance(value, dict) or not value:
        yield path
        return
    for key, inner in value.items():
        yield from _leaves((*path, str(key)), inner)


def suggest(path: KeyPath) -> str | None:
    """Return the key that was meant, or why there is none; None where nothing is near.

    A key of the same section comes first, then what does the same in other trainers.
    """
    section = section_at(path[:-1])
    beside = list(section.model_fields) if section is not None else []
    inside = [key for key in known_keys() if _ends(key) == (path[0], path[-1])]
    for cutoff in (0.9, 0.75):
        if near := difflib.get_close_matches(path[-1], beside, n=1, cutoff=cutoff):
            return ".".join((*path[:-1], near[0]))
        if len(inside) == 1:
            return inside[0]
        if keys := keys_like(path):
            return " or ".join(keys)
    candidates = [*known_keys(), *(".".join(p) for p in sections() if p)]
    scored = [(_likeness(path, key), -index, key) for index, key in enumerate(candidates)]
    score, _, key = max(scored)
    return key if score >= 0.75 else None


def _ends(key: str) -> tuple[str, str]:
    parts = key.split(".")
    return parts[0], parts[-1]


def _likeness(path: KeyPath, key: str) -> float:
    """Return the likeness of the last words; a common first section breaks ties."""
    parts = key.split(".")
    leaf = difflib.SequenceMatcher(None, path[-1], parts[-1]).ratio()
    return leaf + 0.05 * (path[0] == parts[0])
