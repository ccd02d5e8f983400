"""versions.jsonl: which weights were published as which version."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rlcore.errors import DataError
from rlcore.runs.files import cut_torn_line, sync


@dataclass(frozen=True)
class Version:
    # a counter of publications: it never goes back, not even when training does
    version: int
    step: int  # the optimizer has done this many training steps
    incarnation: int  # how often the trainer was started before in this run


def read_versions(path: Path) -> list[Version]:
    """Every version that a run took, in order. A last line that a kill tore apart was never used,
    and is left out.

    Raises:
        DataError: a line is no version; names it.
    """
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    try:
        return [Version(**json.loads(line)) for line in lines]
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: not a journal of versions: {error}") from error


class VersionJournal:
    """Every version that was ever published by a run, one line each (rank 0).

    Args:
        newest: known to be taken, whatever `path` says: of the checkpoint that the run goes on
            from.
    """

    def __init__(self, path: Path, *, newest: int = 0) -> None:
        self.path = path
        known = read_versions(path)
        if path.exists():
            cut_torn_line(path)
        self.last = max(newest, known[-1].version if known else 0)
        self.incarnation = known[-1].incarnation + 1 if known else 0

    def next(self, step: int) -> Version:
        """Taken, on the disk, before the first byte moves: a version that failed half-way is never
        used again.
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
