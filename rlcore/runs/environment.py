"""environment.jsonl: machine, packages and data of each start of a run, one JSON object a start."""

from __future__ import annotations

import json
import platform
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore import __version__
from rlcore.errors import DataError


def describe_start(step: int, source: Mapping[str, Any], *, gpus: list[str]) -> dict[str, Any]:
    """Describe this process for the record.

    Args:
        step: after which the run goes on.
        source: the state of the source of samples, which names its data.
    """
    stream = source.get("stream", {})
    return {
        "after": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "rlcore": __version__,
        "commit": _commit(Path(__file__).parents[2]),
        "gpus": gpus,
        "packages": dict(sorted(_packages().items())),
        "data": {name: stream[name] for name in ("size", "fingerprint") if name in stream},
    }


def append_start(path: Path, start: Mapping[str, Any]) -> None:
    """Add a start to the record."""
    with open(path, "a") as file:
        file.write(json.dumps(start) + "\n")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Read all starts, [] where there is no record.

    Raises:
        DataError: a line is no JSON object.
    """
    if not path.exists():
        return []
    try:
        starts = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        if all(isinstance(start, dict) for start in starts):
            return starts
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); delete the file to go on without") from None
    raise DataError(f"{path}: expected one JSON object a line")


def _packages() -> dict[str, str]:
    """Return versions by the names of folders; reading all their metadata takes a second."""
    found: dict[str, str] = {}
    for folder in map(Path, sys.path):
        for path in folder.glob("*.dist-info") if folder.is_dir() else ():
            name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
            found.setdefault(name.lower().replace("_", "-"), version)
    return found


def _commit(root: Path) -> str | None:
    """Return the commit of a checkout, which its files name; None for an installed package."""
    git = root / ".git"
    try:
        if git.is_file():  # a worktree names its folder
            git = Path(git.read_text().removeprefix("gitdir:").strip())
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        shared = git / "commondir"
        common = git / shared.read_text().strip() if shared.exists() else git
        loose = common / name
        if loose.exists():
            return loose.read_text().strip()
        packed = (common / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except OSError:
        return None
