"""Published versions of the weights: versions.jsonl."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import DataError
from rlcore.runs.files import cut_torn_line, sync

LARGEST = 1 << 53  # of a number in the journal


@dataclass(frozen=True)
class Version:
    """One publication of weights."""

    version: int  # counts publications: it never goes back, not even when training does
    step: int  # number of training steps behind these weights
    incarnation: int  # number of earlier starts of the trainer in this run


def read_versions(path: Path) -> list[Version]:
    """Read every version of a run, in order. A torn last line was never used and is left out.

    Raises:
        DataError: a line is no version; names it.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: list[Version] = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_version(json.loads(line), found))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a journal of versions: {error}") from error
    return found


def _version(entry: Any, before: Sequence[Version]) -> Version:
    """Read a line. Raises ValueError or TypeError unless it can come behind those `before` it."""
    version = Version(**entry)
    for value in (version.version, version.step, version.incarnation):
        if type(value) is not int or not 0 <= value < LARGEST:
            raise ValueError(f"{str(entry)[:80]}, expected whole numbers from 0")
    if before and version.version <= before[-1].version:
        raise ValueError(
            f"version {version.version} after {before[-1].version}: versions only grow"
        )
    return version


class VersionJournal:
    """Records every version that a run ever published, a line each (rank 0).

    Args:
        newest: a version that was taken whatever `path` says: that of the checkpoint from which the
            run goes on.
    """

    def __init__(self, path: Path, *, newest: int = 0) -> None:
        self.path = path
        known = read_versions(path)
        if path.exists():
            cut_torn_line(path)
        self.last = max(newest, known[-1].version if known else 0)
        self.incarnation = known[-1].incarnation + 1 if known else 0

    def next(self, step: int) -> Version:
        """Take the next version. It is on the disk before the first byte of weights moves.

        A version that failed half-way is therefore never used again.
        """
        entry = Version(self.last + 1, step, self.incarnation)
        is_new = not self.path.exists()
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(self.path.parent)
        self.last = entry.version
        return entry
