"""Draws from several sources by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.data.order import permutation
from rlcore.data.prompts import PromptStream

_BLOCK = 4096  # draws whose sources are found at once
_WORDS = 1 << 64


@dataclass(frozen=True)
class Share:
    """One source: its rows, which lie side by side, and its weight."""

    name: str
    first: int
    size: int
    weight: float


class MixtureStream(PromptStream):
    """Endless draws from several sources, each with the probability that its weight says.

    A source's draws are those of a `PromptStream` of its own. All is addressed: draw d is the k-th
    of its source, where k counts the draws before d that fell to the same source. So the order is a
    function of the seed, the weights and the sizes alone.
    """

    def __init__(
        self, shares: Sequence[Share], *, seed: int, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        digest = hashlib.blake2b(repr([*shares]).encode(), digest_size=8).hexdigest()
        super().__init__(
            sum(share.size for share in shares),
            seed=seed,
            shuffle=shuffle,
            fingerprint=f"{fingerprint}+{digest}",
        )
        self.shares = tuple(shares)
        weights = [Fraction(share.weight) for share in shares]
        total = sum(weights)
        bounds = [int(sum(weights[: i + 1]) / total * _WORDS) for i in range(len(weights))]
        # Of all words the first bounds[0] say source 0, and so on.
        self._bounds = np.array([bound - 1 for bound in bounds], dtype=np.uint64)
        self._seeds = [_number(f"{seed}:{share.name}") for share in shares]
        self._chooser = _number(f"{seed}:source of a draw")
        # A draw may lie in a source's next pass already while others are in the last.
        self._permutation = lru_cache(maxsize=2 * len(shares))(permutation.__wrapped__)
        self._sources = lru_cache(maxsize=2)(self._sources_of_block)
        # counts[b, s]: draws of source s in the blocks before b; it grows with the draws
        self._counts: list[NDArray[np.int64]] = [np.zeros(len(shares), dtype=np.int64)]

    @property
    def order(self) -> dict[str, Any]:
        """See `PromptStream.order`; the seed chooses the sources too."""
        return {"data.shuffle": self.shuffle, "run.seed": self.seed}

    def source(self, draw: int) -> int:
        """Return the index of the source of a draw."""
        block, at = divmod(draw, _BLOCK)
        return int(self._sources(block)[at])

    def row(self, draw: int) -> int:
        """Return the row of a draw, counted over all sources."""
        block, at = divmod(draw, _BLOCK)
        while len(self._counts) <= block:
            done = len(self._counts) - 1
            made = np.bincount(self._sources(done), minlength=len(self.shares))
            self._counts.append(self._counts[-1] + made)
        sources = self._sources(block)
        source = int(sources[at])
        share = self.shares[source]
        nth = int(self._counts[block][source]) + int((sources[:at] == source).sum())
        epoch, place = divmod(nth, share.size)
        if self.shuffle:
            place = int(self._permutation(share.size, self._seeds[source], epoch)[place])
        return share.first + place

    def rows_of(self, draw: int) -> range:
        """Return the rows of the source of a draw."""
        share = self.shares[self.source(draw)]
        return range(share.first, share.first + share.size)

    def _sources_of_block(self, block: int) -> NDArray[np.int64]:
        """Return the source of each draw of a block, int64 [_BLOCK]."""
        key = np.array([self._chooser, block], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw(_BLOCK)
        return np.searchsorted(self._bounds, words, side="left").astype(np.int64)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
