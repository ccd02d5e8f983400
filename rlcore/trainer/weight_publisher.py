"""Publication of weights as a transaction: an engine has a whole version or takes no traffic.

    open (pause, begin) -> buckets in one fixed order -> finish (verify, end, set version, resume)

All trainer ranks take part, since a bucket is gathered from all of them (sender_ranks.py). When an
engine fails midway, all ranks complete the gathers; then the whole transaction runs again with the
remaining engines. An engine that restarted in between gets the current version in a transaction of
its own, while the others keep serving.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from rlcore.errors import PartLost, PublicationFailed, RlcoreError, RunFailed
from rlcore.interfaces import PolicyBackend, WeightSource
from rlcore.runs.versions import VersionJournal
from rlcore.timeline.recorder import RECORDER, now
from rlcore.trainer.rank_sync import RankSync, on_rank0
from rlcore.trainer.sender_ranks import SenderRanks

MAX_ATTEMPTS = 5
# Rank 0's result of an attempt; any other string is the reason why no attempt can follow.
DONE = "done"
AGAIN = "again"
# Followed by the orders of the sending ranks.
OPEN = "open"

T = TypeVar("T")
logger = logging.getLogger(__name__)


class WeightPublisher:
    """Publishes the policy. Every rank has one; `journal` and `published` are used on rank 0 only.

    Args:
        ranks: this rank's part in publications.
        timeout_s: how long a rank waits for rank 0 to open or close a publication.
        published: called with step, version and incarnation once all remaining engines have the
            version.
    """

    def __init__(
        self,
        backend: PolicyBackend,
        sync: RankSync,
        ranks: SenderRanks,
        *,
        journal: VersionJournal | None,
        timeout_s: float,
        published: Callable[[int, int, int], None] = lambda step, version, incarnation: None,
    ) -> None:
        self.backend = backend
        self.sync = sync
        self.ranks = ranks
        self.journal = journal
        self.published = published
        self.timeout_s = timeout_s
        # The newest published version, which the engines hold (rank 0).
        self.version = 0

    def publish(self, step: int) -> str:
        """Send a new version to all engines.

        Returns:
            "", or the reason why the run must stop; the same on every rank.
        """
        for _ in range(MAX_ATTEMPTS):
            outcome = self._attempt(step)
            if outcome != AGAIN:
                return "" if outcome == DONE else outcome
        return f"the weights of step {step} could not be published in {MAX_ATTEMPTS} attempts"

    def catch_up(self) -> str:
        """Send the current version to the engines that wait for it. Returns as `publish` does.

        There is only one attempt, since an engine that fails is restarted.
        """
        outcome = self._attempt(None)
        return "" if outcome in (DONE, AGAIN) else outcome

    def _attempt(self, step: int | None) -> str:
        """Run the transaction once: with a new version for `step`, or as a catch-up if None.

        Engines that lack the weights below the adapters take them in a transaction before.

        Returns:
            `DONE`, `AGAIN`, or why another attempt would not help.
        """
        if (base := self.backend.base) is not None:
            outcome = self._transaction(base, step, is_base=True)
            if outcome != DONE:
                return outcome
        return self._transaction(self.backend, step)

    def _transaction(self, source: WeightSource, step: int | None, *, is_base: bool = False) -> str:
        """Send what `source` has; returns as `_attempt` does.

        Args:
            is_base: only to the engines that lack it, which may be none; they stay without a
                version.
        """
        began = now()
        buckets = source.buckets()

        def opening() -> list[str] | str:
            if step is not None and not is_base:
                self.version = on_rank0(self.journal).next(step).version
            orders = self.ranks.order(buckets, only_stale=step is None, is_base=is_base)
            return DONE if orders is None else [OPEN + order for order in orders]

        def joining() -> str:
            self.ranks.join()
            return OPEN

        def closing() -> str:
            self.ranks.finish(None if is_base else self.version)
            return DONE

        def closed() -> None:
            if step is not None and not is_base:
                self.published(step, self.version, on_rank0(self.journal).incarnation)

        outcome = self._open(opening)
        self._record("opening", began)
        if not outcome.startswith(OPEN):
            return outcome
        if self.ranks.open(outcome.removeprefix(OPEN), buckets):
            outcome = self._on_rank0("joining the engines", joining)
            if outcome != OPEN:
                self.ranks.end(done=False)
                return outcome
        began = now()
        for bucket, flat in source.export_buckets(everywhere=self.ranks.everywhere):
            began = self._record(f"gathering bucket {bucket.index}", began)
            if self.ranks.send(bucket, flat):
                began = self._record(f"sending bucket {bucket.index}", began)
        outcome = self._on_rank0("closing a publication", closing, then=closed)
        self.ranks.end(done=outcome == DONE)
        self._record("closing", began)
        return outcome

    def _open(self, work: Callable[[], list[str] | str]) -> str:
        """Open a publication on rank 0. Returns to each rank its own outcome; otherwise as below.

        Args:
            work: returns the outcome of each rank, or one for all.
        """

        def run() -> list[str]:
            outcomes = self._or_cancel(work)
            everyone = self.sync.world_size
            return [outcomes] * everyone if isinstance(outcomes, str) else outcomes

        return self.sync.scatter("opening a publication", run, timeout_s=self.timeout_s)

    def _on_rank0(
        self, what: str, work: Callable[[], str], then: Callable[[], None] = lambda: None
    ) -> str:
        """Run a stage on rank 0. Returns its outcome on every rank; an error in `work` cancels all.

        `then` follows successful work, while the other ranks still wait.
        """
        return self.sync.broadcast(
            what, lambda: self._or_cancel(work, then), timeout_s=self.timeout_s
        )

    def _or_cancel(self, work: Callable[[], T], then: Callable[[], None] = lambda: None) -> T | str:
        try:
            outcome = work()
        except RlcoreError as error:
            return self._cancel(error)
        then()
        return outcome

    def _record(self, stage: str, began: float) -> float:
        """Record a stage on this sender's timeline track. Returns the stage's end."""
        ended = now()
        RECORDER.add(("publication", self.sync.track[0]), stage, began, ended)
        return ended

    def _cancel(self, failure: RlcoreError) -> str:
        try:
            self.ranks.cancel()
        except RlcoreError as error:
            # recovery: a lost service has nothing to cancel
            if not isinstance(error, PublicationFailed):
                failure = error
        if isinstance(failure, PublicationFailed):
            # recovery: try again with the engines left
            return AGAIN
        # recovery: the trainer saves, then stops
        if isinstance(failure, RunFailed) and not isinstance(failure, PartLost):
            return str(failure)
        raise failure
