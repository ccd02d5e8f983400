"""The prompts of a run, the stream of their draws, and the ledger of what became of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.data.prompts import Prompt, PromptSet, PromptStream
from rlcore.data.sample import Sample
from rollout.accounting.journal import LedgerJournal
from rollout.accounting.ledger import Ledger


class PromptQueue:
    """Moves draws in the stream and the ledger at once, and in the journal that is kept of it."""

    def __init__(self, prompts: PromptSet, stream: PromptStream) -> None:
        self._prompts = prompts
        self.stream = stream
        self.journal = LedgerJournal()
        self.ledger = Ledger(self.journal.record)
        # step and ledger that the run goes on from
        self._restored: tuple[int, dict[str, Any]] = (0, self.ledger.snapshot())

    def take(self, count: int) -> list[int]:
        """Take the next `count` draws, which are in flight from now on."""
        draws = self.stream.take(count)
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
        self.stream.settled(draw)

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

    # --- state ------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The state of stream and ledger as JSON."""
        return {"stream": self.stream.snapshot(), "ledger": self.ledger.snapshot()}

    def beginning(self) -> dict[str, Any]:
        """The snapshot before the first draw."""
        return {
            "stream": self.stream.beginning(),
            "ledger": Ledger().snapshot(),
        }

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
