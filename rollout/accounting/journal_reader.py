"""Reads a ledger's journal: which entries count, which were rewound, and the ledger at any cut.

The journal of a long run has hundreds of millions of lines. So they stay on the disk: a `History`
knows which of them count, and reads them again for each question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from rlcore.errors import DataError
from rollout.accounting.ledger import Ledger, Transition

DETAILS: dict[Transition, str] = {
    "consumed": "step",
    "dropped": "by",
    "failed": "kind",
    "requeued": "because",
}
DETAIL_TYPES: dict[Transition, tuple[type, ...]] = {
    "consumed": (int,),
    "dropped": (str,),
    "failed": (str,),
    "requeued": (str, type(None)),
}
# what a curriculum adds to each draw of an entry, in the same order
OF_EACH: dict[Transition, str] = {"drawn": "rows", "finished": "passed"}
OF_EACH_TYPES: dict[Transition, type] = {"drawn": int, "finished": str}
TRANSITIONS: tuple[Transition, ...] = (
    "drawn",
    "finished",
    "consumed",
    "dropped",
    "failed",
    "requeued",
)
Entry = dict[str, Any]
Moment = tuple[int, Transition, int | str | None, int | None]
"""Of a draw: line number, transition, its detail (see `Record`), line that rewound it."""


class JournalPosition(NamedTuple):
    """The position before a line of the journal."""

    line: int  # number of the line
    byte: int  # its first byte
    transitions: int  # lines of transitions before it that count


BEGINNING = JournalPosition(1, 0, 0)


class LineRange(NamedTuple):
    """Neighbouring lines of the journal."""

    begin: JournalPosition
    end: JournalPosition
    rewound_by: int | None = None  # number of the line that rewound them; None while they count


@dataclass
class History:
    """Which lines of a journal count, in order."""

    path: Path
    counted: list[LineRange] = field(default_factory=list)
    rewound: list[LineRange] = field(default_factory=list)
    rewound_transitions: int = 0
    cuts: dict[int, JournalPosition] = field(default_factory=lambda: {0: BEGINNING})  # by step
    # line number of a start, step from whose cut the run went on
    starts: list[tuple[int, int]] = field(default_factory=list)
    # step -> rollout.max_staleness when its batch was handed over
    bounds: dict[int, int] = field(default_factory=dict)
    prompts: tuple[int, str] | None = None  # of the last start
    max_staleness: int = 0  # likewise

    def entries(self, until: JournalPosition | None = None) -> Iterator[tuple[int, Entry]]:
        """The entries that count, with their line numbers.

        These are transitions, cuts, and starts that hold a ledger.
        """
        for lines in self.counted:
            yield from self._read(lines, until)

    def _read(
        self, lines: LineRange, until: JournalPosition | None = None
    ) -> Iterator[tuple[int, Entry]]:
        end = lines.end if until is None else min(lines.end, until)
        with open(self.path, "rb") as file:
            file.seek(lines.begin.byte)
            for number in range(lines.begin.line, end.line):
                yield number, orjson.loads(file.readline())

    def at(self, step: int | None = None) -> Ledger | None:
        """The ledger at the cut of `step`, or at the end; None where there is no such cut.

        Raises:
            DataError: an entry contradicts those before it; names its line.
        """
        if step is not None and step not in self.cuts:
            return None
        ledger = Ledger()
        for number, entry in self.entries(until=None if step is None else self.cuts[step]):
            try:
                _apply(ledger, entry)
            except ValueError as error:
                raise DataError(f"{self.path}:{number}: {error}") from error
        return ledger

    def life(self, draw: int) -> list[Moment]:
        """All transitions of one draw, those that count and those that were rewound."""
        return [
            (number, transition, detail, lines.rewound_by)
            for lines in sorted([*self.counted, *self.rewound], key=lambda lines: lines.begin.line)
            for number, entry in self._read(lines)
            for transition, moved, detail in transitions_of(entry)
            if moved == draw
        ]

    def rewind(self, start: JournalPosition, step: int, *, anew: bool) -> JournalPosition:
        """Go back to the cut of `step`, as the line at `start` says.

        Args:
            anew: the line holds the ledger itself, so nothing before it counts.

        Returns:
            The position that was gone back to.

        Raises:
            DataError: there is no such cut.
        """
        if not anew and step not in self.cuts:
            raise DataError(
                f"{self.path}:{start.line}: a start from step {step}, of which there is no cut"
            )
        cut = BEGINNING if anew else self.cuts[step]
        self.rewound += [
            LineRange(max(begin, cut), end, rewound_by=start.line)
            for begin, end, _ in self.counted
            if end > cut
        ]
        self.counted = [
            LineRange(begin, min(end, cut)) for begin, end, _ in self.counted if begin < cut
        ]
        self.rewound_transitions += start.transitions - cut.transitions
        self.cuts = {at: position for at, position in self.cuts.items() if at <= step}
        self.bounds = {at: bound for at, bound in self.bounds.items() if at <= step}
        self.starts.append((start.line, step))
        return cut


def read_journal(path: Path) -> History:
    """Find out what counts of a journal.

    A last line without its newline is left out: it is being written, or was torn by a kill.

    Raises:
        DataError: the file is missing, or a line is no entry of a journal; names it.
    """
    history = History(path)
    begin = BEGINNING
    here = BEGINNING
    for entry, size in _parsed(path):
        behind = JournalPosition(here.line + 1, here.byte + size, here.transitions)
        if "start" in entry:
            history.counted.append(LineRange(begin, here))
            anew = "ledger" in entry
            cut = history.rewind(here, entry["start"], anew=anew)
            behind = behind._replace(transitions=cut.transitions)
            begin = here._replace(transitions=cut.transitions) if anew else behind
            if anew:
                history.cuts = {entry["start"]: behind}
            history.prompts = (entry["prompts"][0], entry["prompts"][1])
            history.max_staleness = entry["max_staleness"]
        elif "cut" in entry:
            history.cuts[entry["cut"]] = behind
            history.bounds[entry["cut"]] = history.max_staleness
        else:
            behind = behind._replace(transitions=behind.transitions + 1)
        here = behind
    history.counted.append(LineRange(begin, here))
    return history


def _parsed(path: Path) -> Iterator[tuple[Entry, int]]:
    """Each whole line, parsed and checked, and its size in bytes."""
    if not path.exists():
        raise DataError(f"{path}: no such file; a run with rollouts writes it")
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = orjson.loads(line)
                check_entry(entry)
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: not an entry of a ledger's journal: {error}"
                ) from None
            yield entry, len(line)


def check_entry(entry: Any) -> None:
    """Raises ValueError unless `entry` has the shape of an entry."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}")
    if "start" in entry:
        _check_start(entry)
        return
    if "cut" in entry:
        if type(entry["cut"]) is not int:
            raise ValueError(f"expected 'cut' with a step, got {str(entry)[:80]}")
        return
    found = [name for name in TRANSITIONS if name in entry]
    if len(found) != 1 or not _is_list(entry[found[0]], int):
        raise ValueError(
            f"expected one of {', '.join(TRANSITIONS)} with a list of draws, got {str(entry)[:80]}"
        )
    each = OF_EACH.get(found[0], "")
    if each in entry:
        fits = _is_list(entry[each], OF_EACH_TYPES[found[0]])
        if not fits or len(entry[each]) != len(entry[found[0]]):
            raise ValueError(f"expected one of {each!r} for each draw, got {str(entry)[:80]}")
    wanted = DETAIL_TYPES.get(found[0])
    if wanted is not None and type(entry.get(DETAILS[found[0]])) not in wanted:
        raise ValueError(f"expected {DETAILS[found[0]]!r} with {found[0]!r}, got {str(entry)[:80]}")


def _check_start(entry: Entry) -> None:
    prompts = entry.get("prompts")
    fits = isinstance(prompts, list) and [type(one) for one in prompts] == [int, str]
    if not fits or not _is_list([entry["start"], entry.get("max_staleness")], int):
        raise ValueError(
            "expected 'start' with a step, max_staleness, prompts (a number and a word), got"
            f" {str(entry)[:80]}"
        )
    if "ledger" in entry and not _is_snapshot(entry["ledger"]):
        raise ValueError(
            f"expected a ledger with codes, lengths and filters, got {str(entry)[:80]}"
        )


def _is_snapshot(ledger: Any) -> bool:
    lists = {"codes": int, "lengths": int, "filters": str}
    return (
        isinstance(ledger, dict)
        and all(_is_list(ledger.get(key), of) for key, of in lists.items())
        and _is_list(ledger.get("settled", []), str)  # older ones have none
    )


def _is_list(found: Any, of: type) -> bool:
    return isinstance(found, list) and all(type(one) is of for one in found)


def transitions_of(
    entry: Mapping[str, Any],
) -> Iterator[tuple[Transition, int, int | str | None]]:
    """Yield the transition, draw and detail of each draw in an entry."""
    for transition in TRANSITIONS:
        draws = entry.get(transition, ())
        each = entry.get(OF_EACH.get(transition, ""))
        if each is None:
            each = [entry.get(DETAILS.get(transition, ""))] * len(draws)
        for draw, detail in zip(draws, each, strict=True):
            yield transition, draw, detail


def _apply(ledger: Ledger, entry: Mapping[str, Any]) -> None:
    if "ledger" in entry:
        ledger.restore(entry["ledger"])
    for transition, draw, detail in transitions_of(entry):
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
