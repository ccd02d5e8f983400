"""Exactly-once accounting: every drawn prompt is in one state, and all of them add up."""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

Transition = Literal["drawn", "finished", "consumed", "dropped", "failed", "requeued"]
Record = Callable[[Transition, int, int | str | None], None]
"""Is called with each transition, its draw, and its detail.

The detail is the step of `consumed`, the filter of `dropped`, the kind of `failed`, the reason of
`requeued`; with a curriculum the row of `drawn` and the outcome of `finished`.
"""

IN_FLIGHT = -1
FINISHED = -2
REQUEUED = -3
FAILED = -4
FIRST_FILTER = -10  # dropped by filter k: FIRST_FILTER - k
STATE_NAMES = {IN_FLIGHT: "in flight", FINISHED: "finished", REQUEUED: "requeued", FAILED: "failed"}
# number of draws that a snapshot packs into one string, once all of them are settled
CHUNK = 1024
MAX_DRAWS = 1 << 28  # limit of the run-length coded part: unsettled draws and a few settled ones
Codes = np.ndarray[Any, np.dtype[np.int64]]


class Ledger:
    """The state of each draw, as one integer: the step >= 1 that consumed it, or a code above.

        draw -> in flight -> finished -> consumed by step s
                    |            |---> dropped by filter f
                    |------------'---> requeued -> in flight ...
                    '----------------> failed: no group could be made of it

    Args:
        record: called after every transition.
    """

    def __init__(self, record: Record = lambda transition, draw, detail: None) -> None:
        # one code for each draw
        self._codes = array("q")
        # packed leading chunks that hold settled draws only, and so never change
        self._settled: list[str] = []
        self._filters: list[str] = []
        self._record = record

    @classmethod
    def of(cls, snapshot: Mapping[str, Any]) -> Ledger:
        """The ledger that `snapshot` describes."""
        ledger = cls()
        ledger.restore(snapshot)
        return ledger

    def __len__(self) -> int:
        return len(self._codes)

    def same_as(self, other: Ledger) -> bool:
        """Whether every draw is in the same state, and the filters have the same names."""
        return (self._codes, self._filters) == (other._codes, other._filters)

    def draw(self, draws: Iterable[int], rows: Iterable[int | None] = ()) -> None:
        """Put draws in flight, new ones in order or requeued ones, with rows that were chosen."""
        for draw, row in zip_longest(draws, rows):
            if draw == len(self._codes):
                self._codes.append(IN_FLIGHT)
                self._record("drawn", draw, row)
            else:
                self._move("drawn", draw, {REQUEUED}, IN_FLIGHT, row)

    def finish(self, draw: int, outcome: str | None = None) -> None:
        """Mark the group of a draw in flight as finished; a curriculum records its `outcome`."""
        self._move("finished", draw, {IN_FLIGHT}, FINISHED, outcome)

    def consume(self, draw: int, step: int) -> None:
        """Mark the finished group of `draw` as consumed by `step`."""
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        self._move("consumed", draw, {FINISHED}, step, step)

    def drop(self, draw: int, filter_name: str) -> None:
        """Mark the finished group of `draw` as dropped by a filter."""
        new = filter_name not in self._filters
        number = len(self._filters) if new else self._filters.index(filter_name)
        self._move("dropped", draw, {FINISHED}, FIRST_FILTER - number, filter_name)
        if new:
            self._filters.append(filter_name)

    def fail(self, draw: int, kind: str) -> None:
        """Mark a draw in flight as failed for good; `kind`: see `rlcore.errors.RolloutFailed`."""
        self._move("failed", draw, {IN_FLIGHT}, FAILED, kind)

    def requeue(self, draw: int, reason: str = "") -> None:
        """Return a draw to the stream; `reason`: the rule by which its samples were given up."""
        self._move("requeued", draw, {IN_FLIGHT, FINISHED}, REQUEUED, reason or None)

    def _move(
        self,
        transition: Transition,
        draw: int,
        allowed: set[int],
        code: int,
        detail: int | str | None = None,
    ) -> None:
        if not 0 <= draw < len(self._codes):
            raise ValueError(f"draw {draw} is unknown: {len(self._codes)} draws were made")
        if self._codes[draw] not in allowed:
            wanted = " or ".join(STATE_NAMES[c] for c in sorted(allowed, reverse=True))
            raise ValueError(f"draw {draw} is {self.state(draw)}, expected {wanted}")
        self._codes[draw] = code
        self._record(transition, draw, detail)

    def state(self, draw: int) -> str:
        """A name of STATE_NAMES, "consumed by step S" or "dropped by F"."""
        return self._name(self._codes[draw])

    def _name(self, code: int) -> str:
        if code >= 1:
            return f"consumed by step {code}"
        if code <= FIRST_FILTER:
            return f"dropped by {self._filters[FIRST_FILTER - code]}"
        return STATE_NAMES[code]

    def unsettled(self) -> list[int]:
        """Draws in flight or finished, in order; a restart draws them again."""
        codes = self._array()
        return np.flatnonzero((codes == IN_FLIGHT) | (codes == FINISHED)).tolist()

    def requeued(self) -> list[int]:
        """Draws that were returned to the stream, in order."""
        return np.flatnonzero(self._array() == REQUEUED).tolist()

    def consumed(self) -> dict[int, list[int]]:
        """The draws that each step consumed, in order."""
        codes = self._array()
        draws = np.flatnonzero(codes >= 1)
        draws = draws[np.argsort(codes[draws], kind="stable")]
        steps, starts = np.unique(codes[draws], return_index=True)
        return dict(zip(steps.tolist(), (part.tolist() for part in np.split(draws, starts[1:]))))

    @property
    def last_step(self) -> int:
        """The last step that consumed draws; 0 before the first."""
        return max(int(self._array().max(initial=0)), 0)

    def balance(self) -> dict[str, int]:
        """How many draws are in each kind of state. Raises ValueError for an unknown state."""
        codes, counts = np.unique(self._array(), return_counts=True)
        out = {"in flight": 0, "finished": 0, "requeued": 0, "consumed": 0}
        for code, count in zip(codes.tolist(), counts.tolist()):
            if not (
                code >= 1 or code in STATE_NAMES or 0 <= FIRST_FILTER - code < len(self._filters)
            ):
                raise ValueError(f"{count} draws have the unknown state {code}")
            name = "consumed" if code >= 1 else self._name(code)
            out[name] = out.get(name, 0) + count
        return out

    def _array(self, start: int = 0) -> Codes:
        return np.array(self._codes[start:] if start else self._codes, dtype=np.int64)

    def snapshot(self) -> dict[str, Any]:
        """The ledger as JSON.

        Chunks of settled draws are packed once each; the remaining draws are run-length coded.
        """
        codes = self._array(len(self._settled) * CHUNK)
        final = (codes >= 1) | (codes <= FIRST_FILTER) | (codes == FAILED)
        while len(codes) >= CHUNK and final[:CHUNK].all():
            self._settled.append(packed(codes[:CHUNK]))
            codes = codes[CHUNK:]
            final = final[CHUNK:]
        starts = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
        lengths = np.diff(np.append(starts, len(codes)))
        tail = {"codes": codes[starts].tolist(), "lengths": lengths.tolist()}
        return {"settled": list(self._settled), **tail, "filters": list(self._filters)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a snapshot. Raises ValueError if a draw is in no known state."""
        # checkpoints of older versions lack the key
        self._settled = list(state.get("settled", ()))
        # checked before the memory is allocated
        if sum(state["lengths"]) > MAX_DRAWS:
            raise ValueError(f"{sum(state['lengths'])} draws, expected at most {MAX_DRAWS}")
        try:
            tail = np.repeat(np.array(state["codes"], dtype=np.int64), state["lengths"])
        except OverflowError as error:
            raise ValueError(f"a draw is in no known state: {error}") from error
        self._codes = array("q", b"".join([*map(unpacked, self._settled), tail.tobytes()]))
        self._filters = list(state["filters"])
        self.balance()


def packed(codes: Codes) -> str:
    """The codes as one JSON string; see `unpacked`."""
    return base64.b64encode(zlib.compress(codes.astype("<i8").tobytes())).decode()


def unpacked(word: str) -> bytes:
    """The codes, 8 bytes each. Raises ValueError for a string not made by `packed`."""
    try:
        content = zlib.decompress(base64.b64decode(word, validate=True))
    except (zlib.error, ValueError) as error:
        raise ValueError(f"draws that a snapshot keeps as one word are damaged: {error}") from None
    return np.frombuffer(content, dtype="<i8").astype(np.int64).tobytes()
