"""Prompts on their way through a run: the stream they are drawn from, and the book of what became
of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.data.prompts import PromptStream
from rollout.accounting.journal import LedgerJournal
from rollout.accounting.ledger import Ledger


class PromptQueue:
    """What moves a draw in the stream and in the ledger at once, and in the journal on the disk
    from `keep_journal` on.
    """

    def __init__(self, stream: PromptStream) -> None:
        self.stream = stream
        self.journal = LedgerJournal()
        self.ledger = Ledger(self.journal.record)
        # step and ledger that it goes on from
        self._restored: tuple[int, dict[str, Any]] = (0, self.ledger.snapshot())

    def take(self, count: int) -> list[int]:
        """The next `count` draws, in flight from now on."""
        draws = self.stream.take(count)
        self.ledger.draw(draws)
        return draws

    def give_back(self, draw: int, reason: str = "") -> None:
        """A draw in flight or finished is the next to be drawn again. `reason`: by which rule its
        samples were given up.
        """
        self.ledger.requeue(draw, reason)
        self.stream.requeue(draw)

    def give_back_unsettled(self) -> None:
        """All that are in flight or finished."""
        for draw in self.ledger.unsettled():
            self.give_back(draw)

    def hand_over(self, draws: Sequence[int], step: int) -> None:
        """The finished groups of these draws are the batch of `step`: its checkpoint is of this
        moment, as `snapshot` is.
        """
        for draw in draws:
            self.ledger.consume(draw, step)
        self.journal.cut(step)

    def adopt(self, draw: int) -> None:
        """A group of this draw is there and finished, whatever the book says; those before it that
        are not drawn are in flight.

        The stream does not know of it before `follow`: that reads the whole book, so it is called
            once, behind the last.

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
        """The stream is where the ledger is."""
        self.stream.restore(
            {
                **self.stream.snapshot(),
                "cursor": len(self.ledger),
                "requeued": self.ledger.requeued(),
            }
        )

    # --- state ------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """JSON-able."""
        return {"stream": self.stream.snapshot(), "ledger": self.ledger.snapshot()}

    def beginning(self) -> dict[str, Any]:
        """The snapshot before the first draw."""
        return {
            "stream": {**self.stream.snapshot(), "cursor": 0, "requeued": []},
            "ledger": Ledger().snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `snapshot` gave. Raises DataError for the snapshot of other prompts."""
        self.stream.restore(state["stream"])
        self.journal.hold()
        self.ledger.restore(state["ledger"])
        self._restored = (self.ledger.last_step, self.ledger.snapshot())

    def keep_journal(self, path: Path, *, max_staleness: int = 0) -> None:
        """From here on the journal is in `path`; what that says of the time after the restored
        state is marked as rewound.

        Args:
            max_staleness: the bound for the steps to come.
        """
        prompts = (self.stream.size, self.stream.fingerprint)
        self.journal.start(path, *self._restored, prompts=prompts, max_staleness=max_staleness)

    def close(self) -> None:
        self.journal.close()
