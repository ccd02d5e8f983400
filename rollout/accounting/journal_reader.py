"""Reads a growing ledger journal: the lines that count, the ledger at any cut, dropped draws.

A long journal stays on disk: a `History` knows which lines count, and reads them for each question.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import orjson

from rlcore.errors import DataError
from rollout.accounting.ledger import Ledger, Transition

TRANSITIONS: tuple[Transition, ...] = get_args(Transition)
DETAILS: dict[Transition, str] = {
    "consumed": "step",
    "dropped": "by",
    "failed": "kind",
    "requeued": "because",
}
DETAIL_TYPES = {"step": (int,), "by": (str,), "kind": (str,), "because": (str, type(None))}
# the column that a curriculum adds to an entry, with one value for each draw
OF_EACH: dict[Transition, str] = {"drawn": "rows", "finished": "passed"}
OF_EACH_TYPES: dict[Transition, type] = {"drawn": int, "finished": str}
SNAPSHOT_TYPES = {"codes": int, "lengths": int, "filters": str}
# beginnings of the frequent lines, which are parsed only when needed
_PARSED_LATER = (b'{"drawn"', b'{"finished"', b'{"consumed"')
MAX_DROPPED = 20_000  # dropped draws kept in memory
Entry = dict[str, Any]
Moment = tuple[int, Transition, int | str | None, int | None]
"""Of a draw: line number, transition, its detail (see `Record`), line that rewound it."""


class JournalPosition(NamedTuple):
    """The position before a line of the journal."""

    line: int  # number of the line
    byte: int  # its first byte
    transitions: int  # counting transition lines before it


BEGINNING = JournalPosition(1, 0, 0)


class LineRange(NamedTuple):
    """Neighbouring lines of the journal."""

    begin: JournalPosition
    end: JournalPosition
    rewound_by: int | None = None  # number of the line that rewound them; None: they count


class DroppedDraw(NamedTuple):
    """A draw whose group was given up, or that was requeued."""

    step: int  # the step being collected
    draw: int
    what: str  # "dropped", "failed" or "requeued"
    why: str  # the filter, failure kind or rule; "" for a draw requeued without loss
    line: int


@dataclass
class History:
    """The lines of a journal, and which of them count.

    Attributes:
        cuts: the position after the cut of each step.
        starts: (line number of a start, step from whose cut the run continued).
        bounds: by step, `rollout.max_staleness` when its batch was handed over.
        dropped: the newest dropped, failed or requeued draws, rewound ones included.
        dropped_counts: counts of all of them by what and why.
    """

    path: Path
    rewound_transitions: int = 0
    cuts: dict[int, JournalPosition] = field(default_factory=lambda: {0: BEGINNING})
    starts: list[tuple[int, int]] = field(default_factory=list)
    bounds: dict[int, int] = field(default_factory=dict)
    dropped: deque[DroppedDraw] = field(default_factory=lambda: deque(maxlen=MAX_DROPPED))
    dropped_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _max_staleness: int = 0  # value of the last start
    _step: int = 0  # step of the last cut
    _before: list[LineRange] = field(default_factory=list)  # lines before the last start
    _begin: JournalPosition = BEGINNING  # position after the last start
    _end: JournalPosition = BEGINNING

    def refresh(self) -> None:
        """Read the lines that were added.

        A last line without a newline is skipped: it is incomplete.

        Raises:
            DataError: the file is missing, or a line is not a journal entry; names the line.
        """
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file; a run with rollouts writes it")
        # the file is shorter than before: the run was started again from scratch
        if self.path.stat().st_size < self._end.byte:
            self.__init__(self.path)  # type: ignore[misc]
        with open(self.path, "rb") as file:
            file.seek(self._end.byte)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                number, byte, transitions = self._end
                later = line.startswith(_PARSED_LATER)
                entry = {} if later else self._parsed(number, line)
                end = JournalPosition(number + 1, byte + len(line), transitions)
                if "start" in entry:
                    end = self._rewind(entry, end)
                elif "cut" in entry:
                    self._step = entry["cut"]
                    self.cuts[self._step] = end
                    self.bounds[self._step] = self._max_staleness
                else:
                    for what, draw, why in transitions_of(entry):
                        found = DroppedDraw(self._step + 1, draw, what, str(why or ""), number)
                        self.dropped.append(found)
                        self.dropped_counts[what, found.why] += 1
                    end = end._replace(transitions=transitions + 1)
                self._end = end

    def _rewind(self, entry: Entry, end: JournalPosition) -> JournalPosition:
        """Go back to the cut that a start names, or to the beginning if it contains the ledger."""
        start = self._end
        step = entry["start"]
        has_ledger = "ledger" in entry
        if not has_ledger and step not in self.cuts:
            raise DataError(f"{self.path}:{start.line}: a start from step {step}, which has no cut")
        cut = BEGINNING if has_ledger else self.cuts[step]
        before: list[LineRange] = []
        for lines in self.lines:
            if lines.rewound_by is not None or lines.end <= cut:
                before.append(lines)
                continue
            if lines.begin < cut:
                before.append(LineRange(lines.begin, cut))
            before.append(LineRange(max(lines.begin, cut), lines.end, rewound_by=start.line))
        self._before = before
        self.rewound_transitions += start.transitions - cut.transitions
        end = end._replace(transitions=cut.transitions)
        self.cuts = {at: position for at, position in self.cuts.items() if at <= step}
        if has_ledger:
            self.cuts = {step: end}
        self._begin = start._replace(transitions=cut.transitions) if has_ledger else end
        self.bounds = {at: bound for at, bound in self.bounds.items() if at <= step}
        self.starts.append((start.line, step))
        self._step = step
        self._max_staleness = entry["max_staleness"]
        return end

    @property
    def lines(self) -> list[LineRange]:
        """All lines but starts without a ledger, in order."""
        return [*self._before, LineRange(self._begin, self._end)]

    def entries(self, until: JournalPosition | None = None) -> Iterator[tuple[int, Entry]]:
        """Counting transitions, cuts, and starts with a ledger, with their line numbers.

        Raises DataError for a line that is not a journal entry.
        """
        for lines in self.lines:
            if lines.rewound_by is None:
                yield from self._read(lines, until)

    def _read(
        self, lines: LineRange, until: JournalPosition | None = None, *, containing: bytes = b""
    ) -> Iterator[tuple[int, Entry]]:
        end = lines.end if until is None else min(lines.end, until)
        with open(self.path, "rb") as file:
            file.seek(lines.begin.byte)
            for number in range(lines.begin.line, end.line):
                line = file.readline()
                if containing in line:
                    yield number, self._parsed(number, line)

    def _parsed(self, number: int, line: bytes) -> Entry:
        try:
            return _checked(orjson.loads(line))
        except ValueError as error:
            raise DataError(
                f"{self.path}:{number}: not an entry of a ledger's journal: {error}"
            ) from None

    def at(self, step: int | None = None) -> Ledger | None:
        """The ledger at the cut of `step`, or at the end; None if there is no such cut.

        Raises DataError for an entry that is invalid or contradicts earlier ones.
        """
        if step is not None and step not in self.cuts:
            return None
        ledger = Ledger()
        for number, entry in self.entries(until=None if step is None else self.cuts[step]):
            try:
                if "ledger" in entry:
                    ledger.restore(entry["ledger"])
                for transition, draw, detail in transitions_of(entry):
                    apply(ledger, transition, draw, detail)
            except ValueError as error:
                raise DataError(f"{self.path}:{number}: {error}") from error
        return ledger

    def life(self, draw: int) -> list[Moment]:
        """All transitions of one draw, including rewound ones."""
        return [
            (number, transition, detail, lines.rewound_by)
            for lines in self.lines
            for number, entry in self._read(lines, containing=str(draw).encode())
            for transition, moved, detail in transitions_of(entry)
            if moved == draw
        ]


def read_journal(path: Path) -> History:
    """Return the history of a journal so far. Raises DataError as `History.refresh`."""
    history = History(path)
    history.refresh()
    return history


def _checked(entry: Any) -> Entry:
    """Validate an entry. Raises ValueError for a wrong shape."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}")
    names = [name for name in TRANSITIONS if name in entry]
    expected = ""
    if "start" in entry:
        numbers = [entry["start"], entry.get("max_staleness")]
        ledger = entry.get("ledger", {"codes": [], "lengths": [], "filters": []})
        if not _is_list(numbers, int) or not _is_list(entry.get("prompts"), int, str):
            expected = "'start' with a step, max_staleness, prompts (a number and a word)"
        elif not (
            isinstance(ledger, dict)
            and all(_is_list(ledger.get(key), of) for key, of in SNAPSHOT_TYPES.items())
            # journals of older versions lack the key
            and _is_list(ledger.get("settled", []), str)
        ):
            expected = "a ledger with codes, lengths and filters"
    elif "cut" in entry:
        if type(entry["cut"]) is not int:
            expected = "'cut' with a step"
    elif len(names) != 1 or not _is_list(entry[names[0]], int):
        expected = f"one of {', '.join(TRANSITIONS)} with a list of draws"
    else:
        (what,) = names
        each = OF_EACH.get(what, "")
        detail = DETAILS.get(what)
        if each in entry and not (
            _is_list(entry[each], OF_EACH_TYPES[what]) and len(entry[each]) == len(entry[what])
        ):
            expected = f"one of {each!r} for each draw"
        elif detail is not None and type(entry.get(detail)) not in DETAIL_TYPES[detail]:
            expected = f"{detail!r} with {what!r}"
    if expected:
        raise ValueError(f"expected {expected}, got {str(entry)[:80]}")
    return entry


def _is_list(found: Any, *of: type) -> bool:
    """Whether `found` is a list of such elements: all of one type, or one type for each."""
    if not isinstance(found, list):
        return False
    types = [type(one) for one in found]
    return types == [*of] if len(of) > 1 else set(types) <= {*of}


def transitions_of(entry: Mapping[str, Any]) -> Iterator[tuple[Transition, int, int | str | None]]:
    """Yield the transition, draw and detail of each draw in an entry."""
    for transition in TRANSITIONS:
        draws = entry.get(transition, ())
        each = entry.get(OF_EACH.get(transition, ""))
        if each is None:
            each = [entry.get(DETAILS.get(transition, ""))] * len(draws)
        for draw, detail in zip(draws, each, strict=True):
            yield transition, draw, detail


def apply(ledger: Ledger, transition: Transition, draw: int, detail: int | str | None) -> None:
    """Make a recorded transition. Raises ValueError if the state of the draw does not allow it."""
    if transition == "drawn":
        ledger.draw([draw])
    elif transition == "finished":
        ledger.finish(draw)
    elif transition == "consumed":
        ledger.consume(draw, cast(int, detail))
    elif transition == "dropped":
        ledger.drop(draw, str(detail))
    elif transition == "failed":
        ledger.fail(draw, str(detail))
    else:
        ledger.requeue(draw)
