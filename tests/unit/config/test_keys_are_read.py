"""Every key is read by something, or a value that would do nothing is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rlcore.config import Config
from rlcore.config.schema import field_section
from rlcore.config.sections.base import Section

ROOT = Path(__file__).parents[3]
SCHEMA = (ROOT / "rlcore/config/sections", ROOT / "rlcore/config/checks")
FOR_CHECKS = {"cluster.nodes"}  # what a layout is checked with before anything starts


def leaves(section: type[Section], path: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner, _ = field_section(field.annotation)
        if inner is None:
            yield f"{path}{name}"
        else:
            yield from leaves(inner, f"{path}{name}.")


def source() -> str:
    """All code but the schema itself and its checks."""
    files = [
        path
        for package in ("rlcore", "backends", "rollout")
        for path in (ROOT / package).rglob("*.py")
    ]
    return "\n".join(path.read_text() for path in files if path.parent not in SCHEMA)


def test_every_key_is_read() -> None:
    code = source()
    keys = list(leaves(Config))
    assert len(keys) > 100
    unread = [key for key in keys if not re.search(rf"\.{key.rpartition('.')[2]}\b", code)]
    assert set(unread) <= FOR_CHECKS
