"""Publication of weights as a transaction: either every serving engine has a whole version, or it
takes no traffic.

    prepare (pause, open) -> buckets in one static order -> finish (close, verify, set version,
    resume)

All trainer ranks take part, since a bucket is gathered from all of them; only rank 0 talks to
engines. When an engine fails in the middle, rank 0 still takes part in the gathers to the end, then
the whole transaction runs again with the engines left. An engine that was started again in between
gets the version at hand in a transaction of its own, while the others go on serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlcore.errors import PartLost, PublicationFailed, RlcoreError, RunFailed
from rlcore.interfaces import PolicyBackend, WeightSink
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.weights import Bucket

MAX_ATTEMPTS = 5
# what rank 0 says of an attempt; anything else is why there can be no other
DONE = "done"
AGAIN = "again"
OPEN = "open"


class WeightPublisher:
    """Publishes the policy. One object a rank; `sink`, `journal` and `published` on rank 0 only.

    Args:
        published: is told each version that is in force, once all engines that are left have it:
            step, version, incarnation.
    """

    def __init__(
        self,
        backend: PolicyBackend,
        sync: RankSync,
        *,
        sink: WeightSink | None,
        journal: VersionJournal | None,
        timeout_s: float,
        published: Callable[[int, int, int], None] = lambda step, version, incarnation: None,
    ) -> None:
        self.backend = backend
        self.sync = sync
        self.sink = sink
        self.journal = journal
        self.published = published
        self.timeout_s = timeout_s
        # of the newest publication: what the engines hold when `publish` has returned (rank 0)
        self.version = 0

    def publish(self, step: int) -> str:
        """A new version, to all engines. Returns "", or why the run cannot go on with it; the same
        on every rank.
        """
        for _ in range(MAX_ATTEMPTS):
            outcome = self._attempt(step)
            if outcome != AGAIN:
                return "" if outcome == DONE else outcome
        return f"the weights of step {step} could not be published in {MAX_ATTEMPTS} attempts"

    def catch_up(self) -> str:
        """The version at hand once more, to the engines alone that wait for it. Returns as
        `publish`.

        One attempt: who fails is started again.
        """
        outcome = self._attempt(None)
        return "" if outcome in (DONE, AGAIN) else outcome

    def _attempt(self, step: int | None) -> str:
        """`DONE`, `AGAIN`, or why another attempt would not help. A `step` gets a new version, None
        is a catch-up.
        """
        failure: RlcoreError | None = None
        buckets = self.backend.buckets()
        opened = self.sync.broadcast(
            "opening a publication", lambda: self._open(step, buckets), timeout_s=self.timeout_s
        )
        if opened != OPEN:
            return opened
        for bucket, flat in self.backend.export_buckets():
            if self.sink is not None and flat is not None and failure is None:
                try:
                    self.sink.send(bucket, flat)
                # recovery: gather to the end, where every rank learns of it
                except RlcoreError as error:
                    failure = error
        return self.sync.broadcast(
            "closing a publication", lambda: self._close(failure, step), timeout_s=self.timeout_s
        )

    def _open(self, step: int | None, buckets: Sequence[Bucket]) -> str:
        assert self.sink is not None
        assert self.journal is not None
        if step is not None:
            self.version = self.journal.next(step).version
        try:
            self.sink.prepare(buckets, only_stale=step is None)
        except RlcoreError as error:
            return self._give_up(error)
        return OPEN

    def _close(self, failure: RlcoreError | None, step: int | None) -> str:
        assert self.sink is not None
        assert self.journal is not None
        if failure is None:
            try:
                self.sink.finish(self.version)
            except RlcoreError as error:
                failure = error
        if failure is not None:
            return self._give_up(failure)
        if step is not None:
            self.published(step, self.version, self.journal.incarnation)
        return DONE

    def _give_up(self, failure: RlcoreError) -> str:
        assert self.sink is not None
        self.sink.cancel()
        # recovery: the next attempt, with the engines left
        if isinstance(failure, PublicationFailed):
            return AGAIN
        # recovery: the trainer saves, then stops
        if isinstance(failure, RunFailed) and not isinstance(failure, PartLost):
            return str(failure)
        raise failure
