"""Sampling masks: for each generated token the set that top-k and top-p left to draw from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingMasks:
    """m sets of tokens, one behind the other. A count of 0 stands for the whole vocabulary.

        counts   2      0     1
        tokens   a c    .     b

    Here the first token was drawn from {a, c}, the second from all, and the third was certain.
    """

    tokens: NDArray[np.int32]  # [counts.sum()], ascending inside a set
    counts: NDArray[np.int32]  # [m]

    def __post_init__(self) -> None:
        for name in ("tokens", "counts"):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != 1:
                raise ValueError(
                    f"token sets: {name} must be one int32 vector, got {array.dtype} {array.shape}"
                )
        if (self.counts < 0).any() or int(self.counts.sum(dtype=np.int64)) != len(self.tokens):
            raise ValueError(
                f"token sets: counts sum up to {self.counts.sum()}, but there are"
                f" {len(self.tokens)} tokens"
            )

    @classmethod
    def whole(cls, size: int) -> SamplingMasks:
        """Make `size` sets of the whole vocabulary."""
        return cls(np.zeros(0, dtype=np.int32), np.zeros(size, dtype=np.int32))

    @classmethod
    def joined(cls, parts: Sequence[SamplingMasks]) -> SamplingMasks:
        """Join sets in order, of a sample with several turns, say."""
        if not parts:
            return cls.whole(0)
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    def missing(self, drawn: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return which of the `drawn` tokens [m] are not in their own set."""
        hits = self.tokens == np.repeat(drawn, self.counts)
        found = np.bincount(
            np.repeat(np.arange(len(self.counts)), self.counts),
            weights=hits,
            minlength=len(self.counts),
        )
        return ((self.counts > 0) & (found == 0)).nonzero()[0]

    def to_record(self) -> dict[str, Any]:
        """Return the sets as JSON-able values."""
        return {"tokens": self.tokens.tolist(), "counts": self.counts.tolist()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> SamplingMasks:
        """Make the sets of a record."""
        return cls(*(np.asarray(record[name], dtype=np.int32) for name in ("tokens", "counts")))
