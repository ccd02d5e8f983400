"""environment.jsonl: machine, packages and data of each start of a run, one JSON object a start."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore import __version__

GIT_S = 5.0


def describe_start(step: int, source: Mapping[str, Any], *, gpus: list[str]) -> dict[str, Any]:
    """Describe this process for environment.jsonl.

    Args:
        step: the step after which the run continues.
        source: the state of the sample source, which names its data.
    """
    stream = source.get("stream", {})
    # Package versions by folder names; reading the metadata would take a second.
    packages: dict[str, str] = {}
    for path in (found for folder in sys.path for found in Path(folder).glob("*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        packages.setdefault(name.lower().replace("_", "-"), version)
    return {
        "after": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "rlcore": __version__,
        "commit": _commit(Path(__file__).parents[2]),
        "gpus": gpus,
        "packages": dict(sorted(packages.items())),
        "data": {name: stream[name] for name in ("size", "fingerprint") if name in stream},
    }


def _commit(root: Path) -> str | None:
    """Return the commit of a checkout; None for an installed package, or without git."""
    if not (root / ".git").exists():
        return None
    # Accept a checkout that another user owns.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
