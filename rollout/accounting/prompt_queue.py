"""The prompts of a run, the stream of their draws, and the ledger of each draw's state."""

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
    """Appends every transition of every draw to ledger.jsonl as it happens (docs/ledger.md).

    A run has one writer. Transitions recorded before `start` are written after its line.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._path = Path()
        # end of this writer's last line; a different file size reveals another writer
        self._end = 0
        # unwritten entries: all since the last `detach`, or only the one that still grows
        self._unwritten: list[dict[str, Any]] = []

    def record(self, transition: Transition, draw: int, detail: int | str | None) -> None:
        """Record the transition of a draw: see `rollout.accounting.ledger.Record`."""
        last = self._unwritten[-1] if self._unwritten else {}
        key = DETAILS.get(transition) or OF_EACH.get(transition, "")
        # every draw has its own detail
        each = key in OF_EACH.values() and detail is not None
        if transition in last and (key in last if each else last.get(key) == detail):
            last[transition].append(draw)
            if each:
                last[key].append(detail)
            return
        entry: dict[str, Any] = {transition: [draw]}
        if detail is not None:
            entry[key] = [detail] if each else detail
        self._unwritten.append(entry)
        self.flush(but=1)

    def flush(self, *, but: int = 0) -> None:
        """Write all recorded entries but the last ones, so that they outlive this process."""
        number = len(self._unwritten) - but
        if self._file is not None and number > 0:
            self._write(*self._unwritten[:number])
            del self._unwritten[:number]

    def cut(self, step: int) -> None:
        """Record that the batch of `step` is handed over now, and sync everything to disk."""
        if self._file is not None:
            self._unwritten.append({"cut": step})
            self.flush()
            os.fsync(self._file)

    def detach(self) -> None:
        """Write nothing until the next `start`: a state is being restored."""
        self.flush()
        self._release()
        # drop what was recorded since an earlier `detach` without a `start`
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
        """Continue in `path` from the cut of `step`, where the ledger was the snapshot `ledger`.

        Args:
            prompts: their number and their fingerprint.

        A damaged file is set aside with a warning. A repeated call before the next `detach` is a
        no-op, since a caller without an answer asks again.
        """
        if self._file is not None:
            return
        entry = {"start": step, "prompts": list(prompts), "max_staleness": max_staleness}
        known = _ledger_at(step, path)
        if known is None or not known.same_as(Ledger.of(ledger)):
            logger.warning(
                "%s lacks the ledger of step %d that the checkpoint has; the ledger is"
                " written to it again",
                path,
                step,
            )
            entry["ledger"] = ledger
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # the file's name must be on disk before its first cut
        sync(path.parent)
        cut_torn_line(path)
        self._path = path
        self._end = os.fstat(self._file).st_size
        self._unwritten.insert(0, entry)
        self.flush()

    def close(self) -> None:
        """Write the pending entries if possible, and close the file."""
        try:
            self.flush()
        # recovery: a resumed run draws again whatever is missing here
        except (OSError, RunFailed) as error:
            logger.warning("the last lines of the ledger could not be written: %s", error)
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, *entries: Mapping[str, Any]) -> None:
        """Append entries. Raises RunFailed if another service has written to the file."""
        assert self._file is not None
        content = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
        written = 0
        if (size := os.fstat(self._file).st_size) != self._end:
            raise RunFailed(
                f"another service writes {self._path}: it has {size} bytes, expected the"
                f" {self._end} that this service wrote; this service stops, since their lines"
                " would contradict each other"
            )
        try:
            while written < len(content):
                written += os.write(self._file, content[written:])
        except OSError:
            # disk full: remove the partial line, so that later lines stay readable
            os.ftruncate(self._file, size)
            raise
        self._end += written


def _ledger_at(step: int, path: Path) -> Ledger | None:
    """The ledger that the journal at `path` has at the cut of `step`, if any."""
    if not path.exists():
        return Ledger() if step == 0 else None
    try:
        return read_journal(path).at(step)
    except DataError as error:
        # recovery: use the checkpoint's ledger, and keep the damaged file under another name
        names = (f"{path.name}.damaged{f'.{n}' if n > 1 else ''}" for n in count(1))
        aside = next(a for a in map(path.with_name, names) if not a.exists())
        logger.warning(
            "%s; it is set aside as %s, and the ledger restarts from the checkpoint",
            error,
            aside.name,
        )
        os.replace(path, aside)
        return None


class PromptQueue:
    """Moves draws in the stream, the ledger and the journal together."""

    def __init__(self, prompts: PromptSet, stream: PromptStream) -> None:
        self._prompts = prompts
        self.stream = stream
        self.journal = LedgerJournal()
        self.ledger = Ledger(self.journal.record)
        # step and ledger from which the run continues
        self._restored: tuple[int, dict[str, Any]] = (0, self.ledger.snapshot())

    def take(self, number: int) -> list[int]:
        """Take the next draws, and put them in flight."""
        draws = self.stream.take(number)
        rows = [self.stream.chosen(draw) for draw in draws]
        self.ledger.draw(draws, rows)
        # record a curriculum's choice before it is used
        if any(row is not None for row in rows):
            self.journal.flush()
        return draws

    def prompt(self, draw: int) -> Prompt:
        """The prompt of a draw."""
        return self._prompts[self.stream.row(draw)]

    def finish(self, draw: int, samples: Sequence[Sample]) -> None:
        """Record that the group of a draw was made and scored."""
        outcome = self.stream.outcome(samples)
        self.ledger.finish(draw, None if outcome is None else str(outcome))
        self.stream.finished(draw, outcome)

    def drop(self, draw: int, filter_name: str) -> None:
        """Record that a filter refuses the finished group of a draw."""
        self.ledger.drop(draw, filter_name)
        self.stream.finish(draw)

    def fail(self, draw: int, kind: str) -> None:
        """Record that the group of a draw in flight is given up for good."""
        self.ledger.fail(draw, kind)
        self.stream.failed(draw)

    def give_back(self, draw: int, reason: str = "") -> None:
        """Requeue a draw in flight or finished, so that it is the next to be drawn again."""
        self.ledger.requeue(draw, reason)
        self.stream.requeue(draw)

    def give_back_unsettled(self) -> None:
        """Requeue all draws in flight or finished."""
        for draw in self.ledger.unsettled():
            self.give_back(draw)

    def hand_over(self, draws: Sequence[int], step: int) -> None:
        """Make the finished groups of these draws the batch of `step`."""
        for draw in draws:
            self.ledger.consume(draw, step)
            self.stream.finish(draw)
        self.journal.cut(step)
        self.stream.handed_over()

    def adopt(self, draw: int, samples: Sequence[Sample]) -> None:
        """Restore the finished group of this draw, whatever state the ledger has for it.

        Earlier draws that the ledger lacks become draws in flight. The stream learns of the change
        in `follow`, which reads the whole ledger: call it once, after the last group.

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
        """Advance the stream to the state of the ledger."""
        self.stream.move(len(self.ledger), self.ledger.requeued())

    def snapshot(self) -> dict[str, Any]:
        """The state of stream and ledger as JSON."""
        return {"stream": self.stream.snapshot(), "ledger": self.ledger.snapshot()}

    def beginning(self) -> dict[str, Any]:
        """The snapshot before the first draw."""
        return {"stream": self.stream.beginning(), "ledger": Ledger().snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a snapshot. Raises DataError if the snapshot belongs to other prompts."""
        self.stream.restore(state["stream"])
        self.journal.detach()
        self.ledger.restore(state["ledger"])
        self._restored = (self.ledger.last_step, self.ledger.snapshot())

    def keep_journal(self, path: Path, *, max_staleness: int = 0) -> None:
        """Write the journal to `path` from now on, where lines after the restored state go void."""
        prompts = (self.stream.size, self.stream.fingerprint)
        self.journal.start(path, *self._restored, prompts=prompts, max_staleness=max_staleness)

    def close(self) -> None:
        """Close the journal."""
        self.journal.close()
