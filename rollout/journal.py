"""ledger.jsonl: every transition of every draw of a run, appended as it happens and never deleted.

    {"start": 0, "prompts": [20, "d41d8c…"]}        a start: what was restored is the cut of step 0, the beginning
    {"drawn": [0, 1, 2, 3]}
    {"finished": [0, 2]}
    {"dropped": [2], "by": "zero_variance"}
    {"requeued": [3], "because": "stale"}           no reason: a workflow, an engine or the run ended before it did
    {"consumed": [0, 1], "step": 1}
    {"cut": 1}                                      the batch of step 1 is handed over: its checkpoint is of this moment

A start from the checkpoint of step s is a rewind: what lies between the cut of step s and that line was done for weights that
are gone, and does not count any more. Where the journal has no such cut, the line holds the ledger itself.

Every line is in the hands of the system when the next kind of transition is recorded, and on the disk at each cut. So a kill
loses what a rewind to the newest cut would give up too.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rlcore.errors import DataError
from rollout.ledger import Ledger, Transition

logger = logging.getLogger(__name__)

DETAILS: dict[Transition, str] = {"consumed": "step", "dropped": "by", "requeued": "because"}
TRANSITIONS: tuple[Transition, ...] = ("drawn", "finished", "consumed", "dropped", "requeued")


class LedgerJournal:
    """The journal of a run, for its one writer. What is recorded before `start` is kept, and written behind its line."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._held: list[dict[str, Any]] = []   # not written yet: since the last `hold`, or one entry that still grows

    def record(self, transition: Transition, draw: int, detail: int | str | None) -> None:
        """A draw has made a transition: see `rollout.ledger.Record`."""
        last = self._held[-1] if self._held else {}
        if transition in last and last.get(DETAILS.get(transition, "")) == detail:
            last[transition].append(draw)
            return
        if self._file is not None:
            self.flush()
        self._held.append({transition: [draw]} | ({} if detail is None else {DETAILS[transition]: detail}))

    def flush(self) -> None:
        """Everything that was recorded outlives this process from here on."""
        if self._file is not None:
            self._write(*self._held)
            self._held = []

    def cut(self, step: int) -> None:
        """The batch of `step` is handed over; its checkpoint's ledger is the one of now. On the disk when this returns."""
        if self._file is not None:
            self._held.append({"cut": step})
            self.flush()
            os.fsync(self._file)

    def hold(self) -> None:
        """A state is being restored: what is recorded from here on belongs behind the next start."""
        self.flush()
        self.close()

    def start(self, path: Path, step: int, ledger: Mapping[str, Any], prompts: tuple[int, str]) -> None:
        """Go on in `path` from the cut of `step`, at which the ledger was `ledger`, a snapshot.

        Args:
            prompts: how many there are, and their fingerprint.

        A file that is damaged is set aside, with a warning.
        """
        self.hold()
        entry: dict[str, Any] = {"start": step, "prompts": list(prompts)}
        known = _ledger_at(step, path)
        if known is None or known.snapshot() != ledger:
            logger.warning("%s has not the ledger of step %d that the checkpoint has: it is written there anew", path, step)
            entry["ledger"] = ledger
        self._file = _open_whole(path)
        self._held.insert(0, entry)
        self.flush()

    def close(self) -> None:
        """What was recorded and not written stays for the next `start`."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, *entries: Mapping[str, Any]) -> None:
        assert self._file is not None
        content, written = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries), 0
        size = os.fstat(self._file).st_size
        try:
            while written < len(content):
                written += os.write(self._file, content[written:])
        except OSError:
            os.ftruncate(self._file, size)      # a full disk: half a line must not stay before later ones
            raise


def _ledger_at(step: int, path: Path) -> Ledger | None:
    """What the journal in `path` says of the cut of `step`, if anything."""
    if not path.exists():
        return Ledger() if step == 0 else None
    try:
        return read_journal(path).at(step)
    except DataError as error:          # recovery: the checkpoint has the ledger
        aside = path.with_name(path.name + ".damaged")
        logger.warning("%s; it is set aside as %s, and the ledger starts anew from the checkpoint", error, aside.name)
        os.replace(path, aside)
        return None


def _open_whole(path: Path) -> int:
    """`path`, to append to; a last line that a kill tore apart is cut off."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    content = path.read_bytes()
    os.ftruncate(file, content.rfind(b"\n") + 1)
    return file


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class History:
    """The entries of a journal that count, in order, each with its line number."""

    path: Path
    entries: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    cuts: dict[int, int] = field(default_factory=dict)      # step -> how many entries lie before and at its cut
    starts: int = 0
    rewound: int = 0            # transitions that count no more
    prompts: tuple[int, str] | None = None      # of the last start

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

    def _start(self, step: int, ledger: Mapping[str, Any] | None) -> None:
        """Rewind to the cut of `step`. That of step 0 is the beginning."""
        kept = self.cuts.get(step, 0) if ledger is None else 0
        self.rewound += sum(1 for _, entry in self.entries[kept:] for _ in _transitions(entry))
        del self.entries[kept:]
        self.cuts = {at: count for at, count in self.cuts.items() if count <= kept and at <= step}
        self.starts += 1


def read_journal(path: Path) -> History:
    """What counts of a journal. A last line without its newline is left out: it is being written, or was torn by a kill.

    Raises:
        DataError: the file is missing, or a line is no entry of a journal; names it.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a run with rollouts writes it") from None
    history = History(path, cuts={0: 0})
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            _check(entry)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not an entry of a ledger's journal: {error}") from None
        if "start" in entry:
            _read_start(history, number, entry)
        elif "cut" in entry:
            history.cuts[entry["cut"]] = len(history.entries)
        else:
            history.entries.append((number, entry))
    return history


def _read_start(history: History, number: int, entry: dict[str, Any]) -> None:
    step, ledger = entry["start"], entry.get("ledger")
    if ledger is None and step not in history.cuts:
        raise DataError(f"{history.path}:{number}: a start from step {step}, of which there is no cut")
    history._start(step, ledger)
    history.prompts = (entry["prompts"][0], entry["prompts"][1])
    if ledger is not None:
        history.entries.append((number, entry))
        history.cuts = {step: 1}


def _check(entry: Any) -> None:
    """Raises ValueError unless `entry` has the shape of one."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}")
    for key in ("start", "cut"):
        if key in entry:
            if type(entry[key]) is not int or (key == "start" and not isinstance(entry.get("prompts"), list)):
                raise ValueError(f"expected {key!r} with a step, got {entry}")
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
