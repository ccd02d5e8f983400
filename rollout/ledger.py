"""Exactly-once accounting: every drawn prompt is in one state, and all of them add up."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

IN_FLIGHT, FINISHED, REQUEUED = -1, -2, -3
FIRST_FILTER = -10                              # dropped by filter k: FIRST_FILTER - k
STATE_NAMES = {IN_FLIGHT: "in flight", FINISHED: "finished", REQUEUED: "requeued"}


class Ledger:
    """The state of each draw, as one integer: a step >= 1 that consumed it, or one of the codes above.

        draw -> in flight -> finished -> consumed by step s
                    |            \\--> dropped by filter f
                    \\--> requeued -> in flight ...
    """

    def __init__(self) -> None:
        self._codes = array("q")                # by draw
        self._filters: list[str] = []

    def __len__(self) -> int:
        return len(self._codes)

    def draw(self, draws: Iterable[int]) -> None:
        """Draws leave the stream: new ones in order, or ones that were requeued."""
        for draw in draws:
            if draw == len(self._codes):
                self._codes.append(IN_FLIGHT)
            else:
                self._move(draw, {REQUEUED}, IN_FLIGHT)

    def finish(self, draw: int) -> None:
        self._move(draw, {IN_FLIGHT}, FINISHED)

    def consume(self, draw: int, step: int) -> None:
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        self._move(draw, {FINISHED}, step)

    def drop(self, draw: int, filter_name: str) -> None:
        if filter_name not in self._filters:
            self._filters.append(filter_name)
        self._move(draw, {FINISHED}, FIRST_FILTER - self._filters.index(filter_name))

    def requeue(self, draw: int) -> None:
        self._move(draw, {IN_FLIGHT, FINISHED}, REQUEUED)

    def _move(self, draw: int, allowed: set[int], code: int) -> None:
        if not 0 <= draw < len(self._codes):
            raise ValueError(f"draw {draw} is unknown: {len(self._codes)} draws were made")
        if self._codes[draw] not in allowed:
            wanted = " or ".join(STATE_NAMES[c] for c in sorted(allowed, reverse=True))
            raise ValueError(f"draw {draw} is {self.state(draw)}, expected {wanted}")
        self._codes[draw] = code

    def state(self, draw: int) -> str:
        """"in flight" | "finished" | "requeued" | "consumed by step S" | "dropped by F"."""
        return self._name(self._codes[draw])

    def _name(self, code: int) -> str:
        if code >= 1:
            return f"consumed by step {code}"
        if code <= FIRST_FILTER:
            return f"dropped by {self._filters[FIRST_FILTER - code]}"
        return STATE_NAMES[code]

    def unsettled(self) -> list[int]:
        """Draws that are in flight or finished, in order: what a restart has to draw again."""
        codes = self._array()
        return np.flatnonzero((codes == IN_FLIGHT) | (codes == FINISHED)).tolist()

    def balance(self) -> dict[str, int]:
        """How many draws are in each kind of state; the counts sum to the draws made.

        Raises:
            ValueError: a draw is in no known state.
        """
        codes, counts = np.unique(self._array(), return_counts=True)
        out = {"in flight": 0, "finished": 0, "requeued": 0, "consumed": 0}
        for code, count in zip(codes.tolist(), counts.tolist()):
            if not (code >= 1 or code in STATE_NAMES or 0 <= FIRST_FILTER - code < len(self._filters)):
                raise ValueError(f"{count} draws have the unknown state {code}")
            name = "consumed" if code >= 1 else self._name(code)
            out[name] = out.get(name, 0) + count
        if sum(out.values()) != len(self):
            raise ValueError(f"the ledger holds {len(self)} draws, but its states add up to {sum(out.values())}: {out}")
        return out

    def _array(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(self._codes, dtype=np.int64)

    def snapshot(self) -> dict[str, Any]:
        """JSON-able; run-length coded, since a step consumes draws that are neighbours."""
        codes = self._array()
        starts = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
        lengths = np.diff(np.append(starts, len(codes)))
        return {"codes": codes[starts].tolist(), "lengths": lengths.tolist(), "filters": list(self._filters)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._codes = array("q", np.repeat(np.array(state["codes"], dtype=np.int64), state["lengths"]).tolist())
        self._filters = list(state["filters"])
        self.balance()
