"""The prompts of a run, the stream of their draws, and the ledger of what became of each."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rlcore.data.prompts import Prompt, PromptSet, PromptStream
from rlcore.data.sample import Sample
from rlcore.errors import DataError, RunFailed
from rlcore.runs.files import cut_torn_line, sync
from rollout.accounting.journal_reader import DETAILS, OF_EACH, read_journal
from rollout.accounting.ledger import Ledger, Transition

logger = logging.getLogger(__name__)


class LedgerJournal:
    """Appends every transition of every draw to ledger.jsonl as it happens, and deletes none.

    docs/ledger.md has the format, and what a kill loses. A run has one writer. Transitions that are
    recorded before `start` are written behind its line.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._path = Path()
        # where the last line of this writer ends; another writer is noticed by it
        self._end = 0
        # entries that are not written yet: all since the last `detach`, or the one that still grows
        self._unwritten: list[dict[str, Any]] = []

    def record(self, transition: Transition, draw: int, detail: int | str | None) -> None:
        """Record the transition of a draw: see `rollout.accounting.ledger.Record`."""
        last = self._unwritten[-1] if self._unwritten else {}
        key = DETAILS.get(transition) or OF_EACH.get(transition, "")
        each = key in OF_EACH.values() and detail is not None  # every draw has a detail of its own
        if transition in last and (key in last if each else last.get(key) == detail):
            last[transition].append(draw)
            if each:
                last[key].append(detail)
            return
        entry: dict[str, Any] = {transition: [draw]}
        if detail is not None:
            entry[key] = [detail] if each else detail
        self._unwritten.append(entry)
        self._flush(len(self._unwritten) - 1)

    def flush(self) -> None:
        """Write everything that was recorded, so that it outlives this process."""
        self._flush(len(self._unwritten))

    def _flush(self, number: int) -> None:
        if self._file is not None and number > 0:
            self._write(*self._unwritten[:number])
            del self._unwritten[:number]

    def cut(self, step: int) -> None:
        """Record that the batch of `step` is handed over now, and bring everything to the disk."""
        if self._file is not None:
            self._unwritten.append({"cut": step})
            self.flush()
            os.fsync(self._file)

    def detach(self) -> None:
        """Write nothing before the next `start`, since a state is being restored."""
        self.flush()
        self._release()
        # recorded since an earlier `detach` that no `start` followed
        self._unwritten.clear()

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

        A damaged file is set aside, with a warning. A second call before the next `detach` does
        nothing: a caller that got no answer asks again.
        """
        if self._file is not None:
            return
        entry = {"start": step, "prompts": list(prompts), "max_staleness": max_staleness}
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
        self._path = path
        self._end = os.fstat(self._file).st_size
        self._unwritten.insert(0, entry)
        self.flush()

    def close(self) -> None:
        """Write what can be written, and close the file."""
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
        """Append entries. Raises RunFailed where the successor of a lost service has written."""
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
    """The ledger that the journal in `path` has at the cut of `step`, if any."""
    if not path.exists():
        return Ledger() if step == 0 else None
    try:
        return read_journal(path).at(step)
    except DataError as error:  # recovery: the checkpoint has the ledger
        names = (f"{path.name}.damaged{f'.{n}' if n > 1 else ''}" for n in count(1))
        aside = next(a for a in map(path.with_name, names) if not a.exists())
        logger.warning(
            "%s; it is set aside as %s, and the ledger starts anew from the checkpoint",
            error,
            aside.name,
        )
        os.replace(path, aside)
        return None


class PromptQueue:
    """Moves draws in the stream and the ledger at once, and in the journal that is kept of it."""

    def __init__(self, prompts: PromptSet, stream: PromptStream) -> None:
        self._prompts = prompts
        self.stream = stream
        self.journal = LedgerJournal()
        self.ledger = Ledger(self.journal.record)
        # step and ledger that the run goes on from
        self._restored: tuple[int, dict[str, Any]] = (0, self.ledger.snapshot())

    def take(self, number: int) -> list[int]:
        """Take the next draws, which are in flight from now on."""
        draws = self.stream.take(number)
        rows = [self.stream.chosen(draw) for draw in draws]
        self.ledger.draw(draws, rows)
        if any(row is not None for row in rows):  # a choice is written down before it is used
            self.journal.flush()
        return draws

    def prompt(self, draw: int) -> Prompt:
        """The prompt of a draw."""
        return self._prompts[self.stream.row(draw)]

    def finish(self, draw: int, samples: Sequence[Sample]) -> None:
        """Note that the group of a draw is made and scored."""
        outcome = self.stream.outcome(samples)
        self.ledger.finish(draw, None if outcome is None else str(outcome))
        self.stream.finished(draw, outcome)

    def drop(self, draw: int, filter_name: str) -> None:
        """Note that a filter refuses the finished group of a draw."""
        self.ledger.drop(draw, filter_name)
        self.stream.settled(draw)

    def fail(self, draw: int, kind: str) -> None:
        """Note that the group of a draw in flight is given up for good: another takes its place."""
        self.ledger.fail(draw, kind)
        self.stream.failed(draw)

    def give_back(self, draw: int, reason: str = "") -> None:
        """Requeue a draw in flight or finished, so that it is the next to be drawn again.

        Args:
            reason: the rule by which its samples were given up.
        """
        self.ledger.requeue(draw, reason)
        self.stream.requeue(draw)

    def give_back_unsettled(self) -> None:
        """Requeue all draws that are in flight or finished."""
        for draw in self.ledger.unsettled():
            self.give_back(draw)

    def hand_over(self, draws: Sequence[int], step: int) -> None:
        """Make the finished groups of these draws the batch of `step`.

        The step's checkpoint holds the state of this moment, as `snapshot` gives it.
        """
        for draw in draws:
            self.ledger.consume(draw, step)
            self.stream.settled(draw)
        self.journal.cut(step)
        self.stream.handed_over()

    def adopt(self, draw: int, samples: Sequence[Sample]) -> None:
        """Note the finished group of this draw, whatever the ledger says of the draw.

        Draws before it that were not drawn are in flight then. The stream does not know of it
        before `follow`, which reads the whole ledger and so is called once, behind the last.

        Raises ValueError for a draw that was consumed or dropped, or has failed.
        """
        later = range(len(self.ledger), draw + 1)
        self.ledger.draw(later, [self.stream.adopted(one) for one in later])
        state = self.ledger.state(draw)
        if state == "requeued":
            self.ledger.draw([draw], [self.stream.chosen(draw)])
        if state != "finished":
            self.finish(draw, samples)

    def follow(self) -> None:
        """Bring the stream to where the ledger is."""
        self.stream.move(len(self.ledger), self.ledger.requeued())

    def snapshot(self) -> dict[str, Any]:
        """The state of stream and ledger as JSON."""
        return {"stream": self.stream.snapshot(), "ledger": self.ledger.snapshot()}

    def beginning(self) -> dict[str, Any]:
        """The snapshot before the first draw."""
        return {"stream": self.stream.beginning(), "ledger": Ledger().snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a snapshot. Raises DataError for the snapshot of other prompts."""
        self.stream.restore(state["stream"])
        self.journal.detach()
        self.ledger.restore(state["ledger"])
        self._restored = (self.ledger.last_step, self.ledger.snapshot())

    def keep_journal(self, path: Path, *, max_staleness: int = 0) -> None:
        """Write the journal to `path` from here on.

        Lines of it that come after the restored state are marked as rewound.

        Args:
            max_staleness: the bound for the steps to come.
        """
        prompts = (self.stream.size, self.stream.fingerprint)
        self.journal.start(path, *self._restored, prompts=prompts, max_staleness=max_staleness)

    def close(self) -> None:
        """Close the journal."""
        self.journal.close()
