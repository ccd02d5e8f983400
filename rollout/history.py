"""What a ledger's journal says: the entries that count, those that were rewound, and the ledger at any cut."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rlcore.errors import DataError
from rollout.ledger import Ledger, Transition

DETAILS: dict[Transition, str] = {"consumed": "step", "dropped": "by", "requeued": "because"}
TRANSITIONS: tuple[Transition, ...] = ("drawn", "finished", "consumed", "dropped", "requeued")


@dataclass
class History:
    """The entries of a journal that count, in order, each with its line number."""

    path: Path
    entries: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    cuts: dict[int, int] = field(default_factory=lambda: {0: 0})    # step -> how many entries lie before its cut
    starts: list[tuple[int, int]] = field(default_factory=list)     # line number, step that was gone on from
    # What counts no more: line number, entry, line number of the start that rewound it.
    rewound: list[tuple[int, dict[str, Any], int]] = field(default_factory=list)
    bounds: dict[int, int] = field(default_factory=dict)            # step -> rollout.max_staleness when it was handed over
    prompts: tuple[int, str] | None = None      # of the last start
    max_staleness: int = 0                      # likewise

    def at(self, step: int | None = None) -> Ledger | None:
        """The ledger as it was at the cut of `step`, or at the end; None where there is no such cut.

        Raises:
            DataError: an entry contradicts those before it; names its line.
        """
        if step is not None and step not in self.cuts:
            return None
        ledger = Ledger()
        for number, entry in self.entries[: None if step is None else self.cuts[step]]:
            try:
                _apply(ledger, entry)
            except ValueError as error:
                raise DataError(f"{self.path}:{number}: {error}") from error
        return ledger

    def touched(self, after: int, until: int) -> set[int] | None:
        """The draws with a transition between the cuts of these two steps; None where one of the cuts is missing."""
        if after not in self.cuts or until not in self.cuts:
            return None
        between = self.entries[self.cuts[after] : self.cuts[until]]
        return {draw for _, entry in between for _, draw, _ in _transitions(entry)}

    def life(self, draw: int) -> list[tuple[int, Transition, int | str | None, int | None]]:
        """Of one draw: line number, transition, what `rollout.ledger.Record` was told with it, line of what rewound it."""
        counted = [(number, entry, None) for number, entry in self.entries]
        found = sorted((*counted, *self.rewound), key=lambda one: one[0])
        return [
            (number, transition, detail, by)
            for number, entry, by in found
            for transition, one, detail in _transitions(entry)
            if one == draw
        ]

    def go_on_from(self, number: int, step: int, ledger: Mapping[str, Any] | None) -> None:
        """A start, in line `number`: rewind to the cut of `step`, or begin anew with `ledger`.

        Raises:
            DataError: there is no such cut.
        """
        if ledger is None and step not in self.cuts:
            raise DataError(f"{self.path}:{number}: a start from step {step}, of which there is no cut")
        kept = 0 if ledger is not None else self.cuts[step]
        self.rewound += [(line, entry, number) for line, entry in self.entries[kept:]]
        del self.entries[kept:]
        self.cuts = {at: count for at, count in self.cuts.items() if at <= step}
        self.bounds = {at: bound for at, bound in self.bounds.items() if at <= step}
        if ledger is not None:
            self.entries, self.cuts = [(number, {"ledger": ledger})], {step: 1}
        self.starts.append((number, step))


def read_journal(path: Path) -> History:
    """What counts of a journal. A last line without its newline is left out: it is being written, or was torn by a kill.

    Raises:
        DataError: the file is missing, or a line is no entry of a journal; names it.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a run with rollouts writes it") from None
    history = History(path)
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            _check(entry)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not an entry of a ledger's journal: {error}") from None
        if "start" in entry:
            history.go_on_from(number, entry["start"], entry.get("ledger"))
            history.prompts, history.max_staleness = (entry["prompts"][0], entry["prompts"][1]), entry["max_staleness"]
        elif "cut" in entry:
            history.cuts[entry["cut"]] = len(history.entries)
            history.bounds[entry["cut"]] = history.max_staleness
        else:
            history.entries.append((number, entry))
    return history


def _check(entry: Any) -> None:
    """Raises ValueError unless `entry` has the shape of one."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}")
    for key, others in (("start", {"max_staleness", "prompts"}), ("cut", set[str]())):
        if key in entry:
            if type(entry[key]) is not int or not others <= set(entry):
                raise ValueError(f"expected {key!r} with {', '.join(('a step', *sorted(others)))}, got {entry}")
            return
    found = [name for name in TRANSITIONS if name in entry]
    if len(found) != 1 or not isinstance(entry[found[0]], list):
        raise ValueError(f"expected one of {', '.join(TRANSITIONS)} with a list of draws, got {str(entry)[:80]}")


def _transitions(entry: Mapping[str, Any]) -> Iterator[tuple[Transition, int, int | str | None]]:
    for transition in TRANSITIONS:
        for draw in entry.get(transition, ()):
            yield transition, draw, entry.get(DETAILS.get(transition, ""))


def _apply(ledger: Ledger, entry: Mapping[str, Any]) -> None:
    if "ledger" in entry:
        ledger.restore(entry["ledger"])
    for transition, draw, detail in _transitions(entry):
        if transition == "drawn":
            ledger.draw([draw])
        elif transition == "finished":
            ledger.finish(draw)
        elif transition == "consumed":
            ledger.consume(draw, cast(int, detail))
        elif transition == "dropped":
            ledger.drop(draw, str(detail))
        else:
            ledger.requeue(draw, str(detail or ""))
