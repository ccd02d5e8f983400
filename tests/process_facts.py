"""What processes tell of themselves, any of which may end at any moment."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty where it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie counts as such
        return []


def variable_of(process: psutil.Process, name: str) -> str | None:
    """A variable of its environment; None where it has ended."""
    try:
        found: str | None = process.environ().get(name)
    except psutil.NoSuchProcess:
        return None
    return found
