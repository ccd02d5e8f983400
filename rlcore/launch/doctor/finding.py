"""What one check of `rlcore doctor` has found, as a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "FAIL"]
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: FAIL where a run would fail; note where it may, or is slower than it could be.
        needed: what a run needs; "" where nothing is asked for.
        advice: what to do; "" where nothing is.
    """

    level: Level
    name: str
    found: str
    needed: str = ""
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.as_note}"

    @property
    def as_note(self) -> str:
        """The line without its level."""
        needed = f"; needed: {self.needed}" if self.needed else ""
        advice = f"; to do: {self.advice}" if self.advice else ""
        return f"{self.name}: {self.found}{needed}{advice}"


def gib(size: float) -> str:
    """Bytes, for people."""
    return f"{size / GIB:.1f} GiB"
