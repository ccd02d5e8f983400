"""Settings as they were written: nested maps whose leaves remember where they came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union

DEFAULT = "default"
OVERRIDE = "override"

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One value (scalar or list), its origin (`file:line` or "override"), and a scalar's text."""

    value: Any
    origin: str
    text: str | None = None


Tree = dict[str, Union[Setting, "Tree"]]


def merge(base: Tree, over: Tree) -> Tree:
    """Put `over` on top of `base`: maps merge, everything else replaces."""
    merged = dict(base)
    for key, new in over.items():
        old = merged.get(key)
        merged[key] = merge(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
    return merged


def plain(tree: Tree) -> dict[str, Any]:
    """Return the values alone."""
    return {
        key: plain(node) if isinstance(node, dict) else node.value for key, node in tree.items()
    }


def settings(tree: Tree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Setting]]:
    """Yield every leaf with its path, in the order written."""
    for key, node in tree.items():
        if isinstance(node, dict):
            yield from settings(node, (*path, key))
        else:
            yield (*path, key), node


def find(tree: Tree, path: KeyPath) -> Setting | Tree | None:
    """Return the node at `path`, or None. The index of a list item finds the list."""
    node: Setting | Tree = tree
    for key in path:
        if isinstance(node, Setting):
            return node
        if key not in node:
            return None
        node = node[key]
    return node


def origin(tree: Tree, path: KeyPath) -> str:
    """Return where `path` was written, for a map its first setting; else "default"."""
    node = find(tree, path)
    if isinstance(node, dict):
        node = next((setting for _, setting in settings(node)), None)
    return DEFAULT if node is None else node.origin
