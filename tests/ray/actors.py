"""Actors of tests, in a module that workers can import: Ray sends classes by name."""

from __future__ import annotations


class Nobody:
    """An actor that only takes resources."""
