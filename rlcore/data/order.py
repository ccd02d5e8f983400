"""The order in which rows are drawn, and the data that a resumed run must find unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from rlcore.errors import DataError

_BLOCKS = 64  # blocks of rows; a snapshot has the sums of each
_CANONICAL = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


@lru_cache(maxsize=2)
def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of pass `epoch`, int64 [size]: a pure function of the arguments.

    Philox words are sorted instead of calling numpy's `permutation`, whose algorithm may change
    between versions.
    """
    words = np.random.Philox(key=np.array([seed & (2**64 - 1), epoch], dtype=np.uint64)).random_raw(
        size
    )
    return np.argsort(words, kind="stable")


def check_order(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse an order that differs from the saved run's.

    Raises:
        DataError: names the changed keys and their saved values.
    """
    changed = [key for key in now if key in saved and saved[key] != now[key]]
    if changed:
        before = " and ".join(f"{key}: {json.dumps(saved[key])}" for key in changed)
        raise DataError(
            f"the run was saved with {before}, and the rows of this pass would come in another"
            " order: some twice, others never; resume with the same, or start a new run from its"
            " weights"
        )


def digest_row(where: str, tokens: NDArray[np.int32], parts: Any) -> int:
    """Return a digest of everything that a row contributes, 64 bits.

    Args:
        where: "file:line" of the row.
        tokens: the tokens of its prompt.
        parts: its label, other columns, messages, tools; the order of columns does not matter.

    Raises:
        DataError: a value is nested too deeply, or has a number beyond 64 bits.
    """
    try:
        canonical = orjson.dumps(parts, default=_plain, option=_CANONICAL)
    except orjson.JSONEncodeError as error:
        raise DataError(f"{where}: a column that a checkpoint cannot compare: {error}") from error
    digest = xxhash.xxh3_64(np.ascontiguousarray(tokens).data)
    digest.update(canonical)
    return digest.intdigest()


def _plain(value: Any) -> Any:
    """Replace a value unknown to JSON by its text, but never by its address."""
    if isinstance(value, bytes | bytearray | memoryview):
        return xxhash.xxh3_64_hexdigest(bytes(value))
    said = type(value).__str__ is not object.__str__
    return str(value) if said else type(value).__qualname__


@dataclass(frozen=True)
class RowRecord:
    """The rows of a data set, as a checkpoint remembers them."""

    digests: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    files: Mapping[str, int] = field(default_factory=dict)  # path -> rows, for messages only
    where: Callable[[int], str] = str  # "file:line" of a row

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all rows, in order."""
        return hashlib.blake2b(self.digests.tobytes(), digest_size=8).hexdigest()

    @cached_property
    def _bounds(self) -> NDArray[np.int64]:
        """The bounds of blocks of rows; first rows have small blocks, as often all rows change."""
        size = len(self.digests)
        even = np.linspace(0, size, min(size, _BLOCKS) + 1).astype(np.int64)
        return np.unique([*even, *(2**k for k in range(size.bit_length()) if 2**k < size)])

    @cached_property
    def _blocks(self) -> list[str]:
        """For each block its sum of digests, and the sum weighted by row number, mod 2^64."""
        numbers = np.arange(1, len(self.digests) + 1, dtype=np.uint64)
        starts = self._bounds[:-1]
        sums = [np.add.reduceat(v, starts) for v in (self.digests, self.digests * numbers)]
        return [f"{plain:016x}{weighted:016x}" for plain, weighted in zip(*sums)]

    def saved(self) -> dict[str, Any]:
        """Return the part of a snapshot that describes the rows, JSON-able."""
        return {"files": dict(self.files), "blocks": self._blocks if len(self.digests) else []}

    def changes(self, saved: Mapping[str, Any]) -> str:
        """Describe the difference to `saved`, "" if it is unknown.

        A change of one row in a block changes the sum by d and the weighted sum by d times the
        row's number, which reveals the row.
        """
        blocks = self._blocks if len(self.digests) else []
        before = saved["blocks"]
        if len(before) != len(blocks) or before == blocks:
            files = saved["files"]
            # The first few of each kind are named.
            changes = {
                "new": [path for path in self.files if files and path not in files],
                "gone": [path for path in files if path not in self.files],
                "with other numbers of rows": [
                    path for path, rows in self.files.items() if files.get(path, rows) != rows
                ],
            }
            named = {what: paths[:3] for what, paths in changes.items() if paths}
            return "".join(f"; {what}: {', '.join(paths)}" for what, paths in named.items())
        changed = [k for k, (one, other) in enumerate(zip(before, blocks)) if one != other]
        block = changed[0]
        gaps = [
            np.uint64((int(blocks[block][part], 16) - int(before[block][part], 16)) % 2**64)
            for part in (slice(0, 16), slice(16, 32))
        ]
        numbers = np.arange(self._bounds[block] + 1, self._bounds[block + 1] + 1, dtype=np.uint64)
        found = numbers[numbers * gaps[0] == gaps[1]]
        if len(found) == 1:
            also = "; others differ too" if len(changed) > 1 else ""
            return f"; {self.where(int(found[0]) - 1)} differs{also}"
        ends = [self.where(int(number) - 1) for number in (numbers[0], numbers[-1])]
        return f"; several rows differ, the first of them between {ends[0]} and {ends[1]}"
