"""Why draws were not trained: what a journal says of filters, failures and draws given back.

Journals of long runs are large, so only the lines that can matter are parsed here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rlcore.errors import DataError
from rollout.accounting.journal_reader import DETAILS, Moment, check_entry, transitions_of

NEWEST = 20_000  # events that are kept
# Lines that tell of nothing else begin with these. Most do, so they are not parsed.
_OTHERS = (b'{"drawn"', b'{"finished"', b'{"consumed"')


class Untrained(NamedTuple):
    """A draw that was given up or given back."""

    step: int  # that was being collected
    draw: int
    what: str  # "dropped", "failed" or "requeued"
    why: str  # the filter, the kind of failure, the rule; "" for a draw given back whole
    line: int


@dataclass
class UntrainedDraws:
    """Reads a journal as it grows. Counts are of all events, also of those that were rewound."""

    path: Path
    newest: deque[Untrained] = field(default_factory=lambda: deque(maxlen=NEWEST))
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    restarts: int = 0
    _step: int = 0  # whose cut was passed
    _byte: int = 0
    _line: int = 0

    def refresh(self) -> None:
        """Read the lines that were added.

        Raises:
            DataError: the file is missing, or a line is no entry of a journal.
        """
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file; a run with rollouts writes it")
        if self.path.stat().st_size < self._byte:  # of a run that was begun anew
            self.__init__(self.path)  # type: ignore[misc]
        with open(self.path, "rb") as file:
            file.seek(self._byte)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._byte += len(line)
                self._line += 1
                if not line.startswith(_OTHERS):
                    self._take(_entry(self.path, self._line, line))

    def _take(self, entry: dict[str, Any]) -> None:
        if "start" in entry:
            self._step = entry["start"]
            self.restarts += 1
        elif "cut" in entry:
            self._step = entry["cut"]
        for event in self._events(entry):
            self.newest.append(event)
            self.counts[event.what, event.why] += 1

    def _events(self, entry: dict[str, Any]) -> Iterator[Untrained]:
        for what in ("dropped", "failed", "requeued"):
            why = str(entry.get(DETAILS[what]) or "")  # type: ignore[index]
            for draw in entry.get(what, ()):
                yield Untrained(self._step + 1, draw, what, why, self._line)


def life_of(path: Path, draw: int) -> list[Moment]:
    """Return all transitions of one draw, as `History.life` does, from one reading of the file.

    Raises:
        DataError: the file is missing, or a line that tells of the draw is no entry of a journal.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; a run with rollouts writes it")
    digits = str(draw).encode()
    moments: list[Moment] = []
    cuts: dict[int, int] = {0: 0}  # step -> line
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            is_mark = line.startswith((b'{"start"', b'{"cut"'))
            if not line.endswith(b"\n") or not (is_mark or digits in line):
                continue
            entry = _entry(path, number, line)
            if "cut" in entry:
                cuts[entry["cut"]] = number
            elif "start" in entry:
                cut = 0 if "ledger" in entry else cuts.get(entry["start"], 0)
                moments = [_rewound(moment, cut, number) for moment in moments]
                cuts = {step: at for step, at in cuts.items() if step <= entry["start"]}
                if "ledger" in entry:
                    cuts = {entry["start"]: number}
            else:
                moments += [
                    (number, what, detail, None)
                    for what, moved, detail in transitions_of(entry)
                    if moved == draw
                ]
    return moments


def _rewound(moment: Moment, cut: int, start: int) -> Moment:
    """Mark a moment behind the cut that a start went back to, unless an earlier one did so."""
    number, what, detail, rewound_by = moment
    return (number, what, detail, start if rewound_by is None and number > cut else rewound_by)


def _entry(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = orjson.loads(line)
        check_entry(entry)
    except ValueError as error:
        raise DataError(f"{path}:{number}: not an entry of a ledger's journal: {error}") from None
    found: dict[str, Any] = entry
    return found
