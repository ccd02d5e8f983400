"""Published versions of the weights: versions.jsonl."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rlcore.errors import DataError
from rlcore.runs.files import cut_torn_line, read_json_lines, sync

MAX_NUMBER = 1 << 53  # upper bound of the numbers in the journal


@dataclass(frozen=True)
class Version:
    """One publication of weights."""

    version: int  # counts publications; never decreases, even when training is rolled back
    step: int  # number of training steps behind these weights
    incarnation: int  # number of earlier starts of the trainer in this run

    def __post_init__(self) -> None:
        for value in (self.version, self.step, self.incarnation):
            if type(value) is not int or not 0 <= value < MAX_NUMBER:
                raise ValueError(f"{str(self)[:80]}, expected whole numbers from 0")


def read_versions(path: Path) -> list[Version]:
    """Read every version of a run, in order. A torn last line was never used and is left out.

    Raises:
        DataError: a line is not a version; names the line.
    """
    found: list[Version] = []
    for number, entry in enumerate(read_json_lines(path), start=1):
        try:
            found.append(Version(**entry))
            if found[1:] and found[-1].version <= found[-2].version:
                raise ValueError(
                    f"version {found[-1].version} after {found[-2].version}: versions only grow"
                )
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: not a journal of versions: {error}") from error
    return found


class VersionJournal:
    """Records every version that a run has published, one line each (rank 0).

    Args:
        newest: the version of the checkpoint from which the run continues; it is taken, whatever
            `path` contains.
    """

    def __init__(self, path: Path, *, newest: int = 0) -> None:
        self.path = path
        known = read_versions(path)
        if path.exists():
            cut_torn_line(path)
        self.last = max(newest, known[-1].version if known else 0)
        self.incarnation = known[-1].incarnation + 1 if known else 0

    def next(self, step: int) -> Version:
        """Take the next version, which is on disk before any weights are sent.

        So a version whose publication failed midway is never used again.
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
