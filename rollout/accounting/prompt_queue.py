"""The prompts of a run, the stream of their draws, and the ledger of what became of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.data.prompts import Prompt, PromptSet, PromptStream
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
        self.ledger.draw(draws)
        return draws

    def prompt(self, draw: int) -> Prompt:
        """The prompt of a draw."""
        return self._prompts[self.stream.row(draw)]

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
        self.journal.cut(step)

    def adopt(self, draw: int) -> None:
        """Note a finished group of this draw, whatever the ledger says of the draw.

        Draws before it that were not drawn are in flight then. The stream does not know of it
        before `follow`, which reads the whole ledger and so is called once, behind the last.

        Raises ValueError for a draw that was consumed or dropped.
        """
        if draw >= len(self.ledger):
            self.ledger.draw(range(len(self.ledger), draw + 1))
        state = self.ledger.state(draw)
        if state == "requeued":
            self.ledger.draw([draw])
        if state != "finished":
            self.ledger.finish(draw)

    def follow(self) -> None:
        """Bring the stream to where the ledger is."""
        self.stream.restore(
            {
                **self.stream.snapshot(),
                "cursor": len(self.ledger),
                "requeued": self.ledger.requeued(),
            }
        )

    # --- state ------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The state of stream and ledger as JSON."""
        return {"stream": self.stream.snapshot(), "ledger": self.ledger.snapshot()}

    def beginning(self) -> dict[str, Any]:
        """The snapshot before the first draw."""
        return {
            "stream": {**self.stream.snapshot(), "cursor": 0, "requeued": []},
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
