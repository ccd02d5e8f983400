"""ledger.jsonl: every transition of every draw of a run, appended as it happens and never deleted.

    {"start": 0, "prompts": [20, "d41d8c…"], "max_staleness": 0}    what was restored is the cut of step 0, the beginning
    {"drawn": [0, 1, 2, 3]}
    {"finished": [0, 2]}
    {"dropped": [2], "by": "zero_variance"}
    {"requeued": [3], "because": "stale"}           no reason: a workflow, an engine or the run ended before it did
    {"consumed": [0, 1], "step": 1}
    {"cut": 1}                                      the batch of step 1 is handed over: its checkpoint is of this moment

A start from the checkpoint of step s is a rewind: what lies between the cut of step s and that line
    was done for weights that
are gone, and does not count any more. Where the journal has no such cut, the line holds the ledger
itself.

Every line is in the hands of the system when the next kind of transition is recorded, and on the
disk at each cut. So a kill loses what a rewind to the newest cut would give up too.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import DataError, RunFailed
from rlcore.runs.files import cut_torn_line, sync
from rollout.accounting.journal_reader import DETAILS, read_journal
from rollout.accounting.ledger import Ledger, Transition

logger = logging.getLogger(__name__)


class LedgerJournal:
    """The journal of a run, for its one writer. What is recorded before `start` is kept, and
    written behind its line.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._path = Path()
        # where the last own line ends: another's writing is known by it
        self._end = 0
        # not written yet: since the last `hold`, or one entry that still grows
        self._held: list[dict[str, Any]] = []

    def record(self, transition: Transition, draw: int, detail: int | str | None) -> None:
        """A draw has made a transition: see `rollout.accounting.ledger.Record`."""
        last = self._held[-1] if self._held else {}
        if transition in last and last.get(DETAILS.get(transition, "")) == detail:
            last[transition].append(draw)
            return
        self._held.append(
            {transition: [draw]} | ({} if detail is None else {DETAILS[transition]: detail})
        )
        self._flush(len(self._held) - 1)

    def flush(self) -> None:
        """Everything that was recorded outlives this process from here on."""
        self._flush(len(self._held))

    def _flush(self, count: int) -> None:
        if self._file is not None and count > 0:
            self._write(*self._held[:count])
            del self._held[:count]

    def cut(self, step: int) -> None:
        """The batch of `step` is handed over; its checkpoint's ledger is the one of now. On the
        disk when this returns.
        """
        if self._file is not None:
            self._held.append({"cut": step})
            self.flush()
            os.fsync(self._file)

    def hold(self) -> None:
        """A state is being restored: what is recorded from here on belongs behind the next start."""
        self.flush()
        self._release()
        # of a state that was restored before this one, and never gone on from
        self._held.clear()

    def start(
        self,
        path: Path,
        step: int,
        ledger: Mapping[str, Any],
        *,
        prompts: tuple[int, str],
        max_staleness: int,
    ) -> None:
        """Go on in `path` from the cut of `step`, at which the ledger was `ledger`, a snapshot.

        Args:
            prompts: how many there are, and their fingerprint.
            max_staleness: the bound for the steps to come.

        A file that is damaged is set aside, with a warning. A second call before the next `hold`
            does nothing: who did not hear
        that the first one was done asks again.
        """
        if self._file is not None:
            return
        entry: dict[str, Any] = {
            "start": step,
            "prompts": list(prompts),
            "max_staleness": max_staleness,
        }
        known = _ledger_at(step, path)
        if known is None or not known.same_as(Ledger.of(ledger)):
            logger.warning(
                "%s has not the ledger of step %d that the checkpoint has: it is written there"
                " anew",
                path,
                step,
            )
            entry["ledger"] = ledger
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sync(path.parent)  # its name is on the disk before the first cut is
        cut_torn_line(path)
        self._path, self._end = path, os.fstat(self._file).st_size
        self._held.insert(0, entry)
        self.flush()

    def close(self) -> None:
        """The end of this service, whatever brought it about."""
        try:
            self.flush()
        # recovery: a resume draws again what is not written down
        except (OSError, RunFailed) as error:
            logger.warning("the last lines of the ledger could not be written: %s", error)
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, *entries: Mapping[str, Any]) -> None:
        """Raises RunFailed where another has written since: a service that was lost must not go on
        in its successor's life.
        """
        assert self._file is not None
        content = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
        written = 0
        if (size := os.fstat(self._file).st_size) != self._end:
            raise RunFailed(
                f"another service writes {self._path}: it has {size} bytes, expected the"
                f" {self._end} that this one left; this one stops, since their lines would"
                " contradict each other"
            )
        try:
            while written < len(content):
                written += os.write(self._file, content[written:])
        except OSError:
            # a full disk: half a line must not stay before later ones
            os.ftruncate(self._file, size)
            raise
        self._end += written


def _ledger_at(step: int, path: Path) -> Ledger | None:
    """What the journal in `path` says of the cut of `step`, if anything."""
    if not path.exists():
        return Ledger() if step == 0 else None
    try:
        return read_journal(path).at(step)
    except DataError as error:  # recovery: the checkpoint has the ledger
        aside = path.with_name(f"{path.name}.damaged")
        number = 1
        while aside.exists():  # of an earlier start
            number += 1
            aside = path.with_name(f"{path.name}.damaged.{number}")
        logger.warning(
            "%s; it is set aside as %s, and the ledger starts anew from the checkpoint",
            error,
            aside.name,
        )
        os.replace(path, aside)
        return None
