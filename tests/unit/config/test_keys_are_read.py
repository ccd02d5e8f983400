"""Every key is read by something, or a value that would do nothing is refused."""

from __future__ import annotations

import re
from pathlib import Path

from rlcore.config.schema import known_keys

ROOT = Path(__file__).parents[3]
SCHEMA = (ROOT / "rlcore/config/sections", ROOT / "rlcore/config/checks")
FOR_CHECKS = {"cluster.nodes"}  # what a layout is checked with before anything starts


def test_every_key_is_read() -> None:
    files = [
        path for name in ("rlcore", "backends", "rollout") for path in (ROOT / name).rglob("*.py")
    ]
    code = "\n".join(path.read_text() for path in files if path.parent not in SCHEMA)
    keys = known_keys()
    assert len(keys) > 100
    unread = [key for key in keys if not re.search(rf"\.{key.rpartition('.')[2]}\b", code)]
    assert set(unread) <= FOR_CHECKS
