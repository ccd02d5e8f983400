"""Which context-parallel rank this is, and which chunks of a sequence it holds."""

from __future__ import annotations

from typing import NamedTuple


class CPRank(NamedTuple):
    """One rank among those that share a pack."""

    size: int = 1
    rank: int = 0

    @property
    def chunks(self) -> int:
        """Into how many chunks a sequence is cut, and so the multiple that its length is padded to."""
        return 1 if self.size == 1 else 2 * self.size

    @property
    def held(self) -> tuple[int, ...]:
        """The chunks of every sequence that this rank holds, in the order of its slots."""
        return (0,) if self.size == 1 else (self.rank, self.chunks - 1 - self.rank)


ALONE = CPRank()
