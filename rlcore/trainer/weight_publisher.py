"""Publication of weights as a transaction: an engine has a whole version or takes no traffic.

    prepare (pause, open) -> buckets in one fixed order -> finish (close, verify, set version,
    resume)

All trainer ranks take part, since a bucket is gathered from all of them; only rank 0 talks to
engines, and ranks to which it assigns some of them send (sender_ranks.py). When an engine fails in
the middle, all ranks still take part in the gathers to the end; then the whole transaction runs
again with the engines that are left. An engine that was started again in between gets the current
version in a transaction of its own, while the others go on serving.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rlcore.errors import PartLost, PublicationFailed, RlcoreError, RunFailed
from rlcore.interfaces import PolicyBackend, WeightSink
from rlcore.runs.versions import VersionJournal
from rlcore.timeline.recorder import RECORDER, now
from rlcore.trainer.handle_exchange import HandleExchange
from rlcore.trainer.rank_sync import RankSync, on_rank0
from rlcore.trainer.sender_ranks import SenderRanks
from rlcore.weights import Bucket

MAX_ATTEMPTS = 5
# Rank 0's answer to an attempt; any other is the reason why there can be no further attempt.
DONE = "done"
AGAIN = "again"
OPEN = "open"  # ... with the ranks that make handles, and the orders of those that send

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Publishes the policy. Every rank has one; `sink`, `journal` and `published` on rank 0 only.

    Args:
        exchange: brings handles of all ranks' GPUs to rank 0; None on the CPU.
        senders: the ranks that send beside rank 0, or help; None where there is one rank.
        timeout_s: how long a rank waits for rank 0 to open or close a publication.
        published: called with step, version and incarnation once all engines that are left have
            the version.
    """

    def __init__(
        self,
        backend: PolicyBackend,
        sync: RankSync,
        *,
        sink: WeightSink | None,
        journal: VersionJournal | None,
        timeout_s: float,
        exchange: HandleExchange | None = None,
        senders: SenderRanks | None = None,
        published: Callable[[int, int, int], None] = lambda step, version, incarnation: None,
    ) -> None:
        self.backend = backend
        self.sync = sync
        self.sink = sink
        self.journal = journal
        self.exchange = exchange
        self.senders = senders
        self.published = published
        self.timeout_s = timeout_s
        self.version = 0  # of the newest publication, which the engines hold (rank 0)

    def publish(self, step: int) -> str:
        """Send a new version to all engines.

        Returns:
            "", or why the run cannot go on; the same on every rank.
        """
        for _ in range(MAX_ATTEMPTS):
            outcome = self._attempt(step)
            if outcome != AGAIN:
                return "" if outcome == DONE else outcome
        return f"the weights of step {step} could not be published in {MAX_ATTEMPTS} attempts"

    def catch_up(self) -> str:
        """Send the current version to the engines that wait for it. Returns as `publish` does.

        There is one attempt: an engine that fails is started again.
        """
        outcome = self._attempt(None)
        return "" if outcome in (DONE, AGAIN) else outcome

    def _attempt(self, step: int | None) -> str:
        """Run the transaction once: with a new version for `step`, or as a catch-up for None.

        Returns:
            `DONE`, `AGAIN`, or why another attempt would not help.
        """
        failure: RlcoreError | None = None
        began = now()
        buckets = self.backend.buckets()
        opened = self.sync.broadcast(
            "opening a publication", lambda: self._open(step, buckets), timeout_s=self.timeout_s
        )
        self._record("opening", began)
        if not opened.startswith(OPEN):
            return opened
        told = json.loads(opened.removeprefix(OPEN))
        owners = told["owners"]
        orders = {int(rank): order for rank, order in told["orders"].items()}
        if self.exchange is not None:
            self.exchange.open(owners)
        if self.senders is not None:
            met = self.senders.open(orders, self._meet, self.timeout_s)
            if met not in ("", OPEN):
                self.senders.abandon()
                return met
        senders = self.senders if self.senders is not None and self.senders.serves else None
        began = now()
        for bucket, flat in self.backend.export_buckets(everywhere=bool(owners or orders)):
            began = self._record(f"gathering bucket {bucket.index}", began)
            handles = self.exchange.collect(bucket, flat) if owners and self.exchange else None
            if flat is None or (senders is None and self.sink is None):
                continue
            if senders is not None:
                senders.send(bucket, flat)
            if self.sink is not None:
                failure = self._send(bucket, flat, handles, failure)
            began = self._record(f"sending bucket {bucket.index}", began)
        outcome = self.sync.broadcast(
            "closing a publication", lambda: self._close(failure, step), timeout_s=self.timeout_s
        )
        if self.exchange is not None:
            self.exchange.close()
        if self.senders is not None and outcome != DONE:
            self.senders.abandon()
        self._record("closing", began)
        return outcome

    def _record(self, stage: str, began: float) -> float:
        """Record a stage on this sender's track of the timeline. Returns its end."""
        ended = now()
        RECORDER.add(("publication", self.sync.track[0]), stage, began, ended)
        return ended

    def _send(
        self,
        bucket: Bucket,
        flat: Tensor,
        handles: Mapping[str, str] | None,
        failure: RlcoreError | None,
    ) -> RlcoreError | None:
        """Send a bucket (rank 0). Returns the first failure, after which engines get no more than
        what they were called for.
        """
        sink = on_rank0(self.sink)
        if failure is not None and handles is None:
            try:
                sink.send_called(bucket, flat)
            except RlcoreError as error:  # recovery: the first failure is the one that counts
                logger.warning("bucket %d after a failure: %s", bucket.index, error)
            return failure
        read_on: Sequence[str] = ()
        if failure is None:
            try:
                sink.send(bucket, flat, handles)
                return None
            except RlcoreError as error:  # recovery: gather to the end, then tell every rank
                failure = error
                self._stop_senders()
                read_on = sink.handle_gpus  # the engines that failed have ended
                if handles is not None:
                    on_rank0(self.exchange).give_up()
        if handles is not None:
            on_rank0(self.exchange).release(handles, read_on=read_on)
        return failure

    def _open(self, step: int | None, buckets: Sequence[Bucket]) -> str:
        if step is not None:
            self.version = on_rank0(self.journal).next(step).version
        sink = on_rank0(self.sink)
        gpus = [] if self.exchange is None else self.exchange.trainer_gpus
        ranks = [] if self.senders is None else self.senders.places
        try:
            sink.prepare(buckets, only_stale=step is None, trainer_gpus=gpus, trainer_ranks=ranks)
        except RlcoreError as error:
            return self._cancel(error)
        owners = {} if self.exchange is None else self.exchange.owners(sink.handle_gpus)
        orders = {} if self.senders is None else dict(sink.sender_orders)
        return f"{OPEN} {json.dumps({'owners': owners, 'orders': orders})}"

    def _meet(self, places: Mapping[int, str]) -> str:
        """Have engines meet the ranks that serve them (rank 0)."""
        try:
            on_rank0(self.sink).meet(places)
        except RlcoreError as error:
            return self._cancel(error)
        return OPEN

    def _close(self, failure: RlcoreError | None, step: int | None) -> str:
        if failure is None:
            try:
                on_rank0(self.sink).finish(self.version)
            except RlcoreError as error:
                failure = error
                self._stop_senders()
        if failure is not None:
            return self._cancel(failure)
        if step is not None:
            self.published(step, self.version, on_rank0(self.journal).incarnation)
        return DONE

    def _stop_senders(self) -> None:
        if self.senders is not None:
            self.senders.give_up(on_rank0(self.sink).stop_order)

    def _cancel(self, failure: RlcoreError) -> str:
        try:
            on_rank0(self.sink).cancel()
        except RlcoreError as error:
            failure = error
        if isinstance(failure, PublicationFailed):  # recovery: try again with the engines left
            return AGAIN
        # recovery: the trainer saves, then stops
        if isinstance(failure, RunFailed) and not isinstance(failure, PartLost):
            return str(failure)
        raise failure
