"""Writes recordings as earlier versions did: JSON lines, compressed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zstandard

from rlcore.data.sample import Sample


def write_earlier(
    path: Path,
    step: int,
    samples: Sequence[Sample],
    change: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write samples, with some fields of each record changed."""
    records = [
        sample.to_record() | {"step": step, "policy_version": None, **change} for sample in samples
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(zstandard.compress(lines.encode()))
