"""The trainer's side of a publication: each rank gets orders from the engines' side, and sends.

Rank 0 calls the engines' side, carries orders and answers between it and the ranks, and otherwise
sends as every rank does. It learns of a failure from the result of a call, the other ranks from the
store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlcore.errors import DeadlineExceeded, PartLost, PublicationFailed, RlcoreError
from rlcore.interfaces import BucketSender, Orders, RankAddress
from rlcore.trainer.rank_sync import RankSync, on_rank0
from rlcore.weights import Bucket


@dataclass(frozen=True)
class PublicationCalls:
    """Rank 0's calls to the `WeightPublication` that runs in the engines' process.

    Args:
        begin: starts a call of one of its methods. For "open" it first replaces a lost service.
        limit_s: limit of one call. Each stage has its own deadline; this limit detects a blocked
            loop.
    """

    begin: Callable[..., Future[Any]]
    limit_s: float

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Make a call and return its result."""
        return self.result(self.begin(method, *arguments))

    def result(self, call: Future[Any]) -> Any:
        """Wait for a call. Raises PublicationFailed if the service is lost meanwhile."""
        try:
            return call.result(self.limit_s)
        except PartLost as error:
            raise PublicationFailed(str(error)) from error
        except TimeoutError as error:
            if call.done():
                raise
            raise DeadlineExceeded(
                f"the engines' event loop did nothing for {self.limit_s:g} s: something blocks it"
            ) from error


class SenderRanks:
    """A rank's part in all publications. Every rank has one and makes the same calls.

    Args:
        make: makes this rank's sender for a transport.
        calls: given on rank 0 only.
    """

    def __init__(
        self,
        sync: RankSync,
        *,
        make: Callable[[str], BucketSender],
        address: RankAddress,
        calls: PublicationCalls | None,
    ) -> None:
        self._sync = sync
        self._make = make
        self._calls = calls
        self._senders: dict[str, BucketSender] = {}
        values = sync.gather("the addresses of the ranks", json.dumps(address))
        # Filled on rank 0 only.
        self.addresses = [RankAddress(*json.loads(value)) for value in values]
        # State of the current publication.
        self._number = 0
        self._sender = BucketSender()
        # Whether this rank sends, and whether ranks other than rank 0 do and need the buckets.
        self._sends = False
        self.everywhere = False
        # The sending ranks other than rank 0, on rank 0.
        self._others: list[int] = []
        self._gathers = False
        # What this rank has packed of each bucket, if engines read it from this rank's memory.
        self._packed: dict[int, Any] = {}
        # The bucket at which the publication failed, and what is still sent.
        self._heard: tuple[int, Any] | None = None
        # When a rank other than rank 0 looks for it again.
        self._next_look = 0.0
        # On rank 0: its own answer to its order, the pending call, the first failure.
        self._answers: dict[int, Any] = {}
        self._enters: Mapping[int, Sequence[int]] = {}
        self._pending: Future[Any] | None = None
        # The bucket of the newest call; beyond the last one when the publication is finished.
        self._bucket = 0
        self.failure: RlcoreError | None = None

    def order(
        self, buckets: Sequence[Bucket], *, only_stale: bool, is_base: bool = False
    ) -> list[str] | None:
        """Open a publication and rank 0's part in it. Returns the order of each rank.

        None where no engine lacks the base.

        Rank 0's own order is not among them: the keys of digests must not be in the store.
        """
        self.failure = None
        calls = on_rank0(self._calls)
        orders: Orders | None = calls("open", buckets, self.addresses, only_stale, is_base)
        if orders is None:
            return None
        self._sends = 0 in orders.ranks
        self._sender = self._sender_of(orders.transport)
        self._answers = {}
        if self._sends:
            self._answers[0] = self._sender.open(orders.ranks[0], buckets)
        self._others = sorted(orders.ranks.keys() - {0})
        self._enters = orders.enters
        if orders.joins and not self._others:
            calls("join", self._answers)
        common = [orders.transport, bool(self._others), orders.joins, orders.gathers]
        return [
            json.dumps([*common, [orders.ranks[rank]] if rank and rank in orders.ranks else []])
            for rank in range(self._sync.world_size)
        ]

    def open(self, order: str, buckets: Sequence[Bucket]) -> bool:
        """Begin a publication. Returns, on every rank alike, whether engines have to `join`.

        Args:
            order: this rank's, of those that `order` returned on rank 0.
        """
        transport, self.everywhere, joins, self._gathers, orders = json.loads(order)
        self._number += 1
        self._packed = {}
        self._heard = None
        self._next_look = 0.0
        rank = self._sync.rank
        answer: Any = None
        if rank:
            self._sends = bool(orders)
            # Other ranks than rank 0 need only themselves, if they send.
            self._others = [rank] if self._sends else []
            if self._sends:
                self._sender = self._sender_of(transport)
                answer = self._sender.open(orders[0], buckets)
        if not (joins and self.everywhere):
            return False
        values = self._sync.gather("the ranks' rendezvous", json.dumps(answer), ranks=self._others)
        # The first value is rank 0's own.
        self._answers |= zip(self._others, map(json.loads, values[1:]))
        said = self._sync.scatter("the rendezvous that each rank enters", self._entered)
        if self._sends:
            self._sender.enter(dict(json.loads(said)))
        return True

    def _entered(self) -> list[str]:
        """The rendezvous of the ranks that each rank helps (rank 0)."""
        return [
            json.dumps([(other, self._answers[other]) for other in self._enters.get(rank, ())])
            for rank in range(self._sync.world_size)
        ]

    def join(self) -> None:
        """Have the engines join the groups of the ranks (rank 0)."""
        on_rank0(self._calls)("join", self._answers)

    def send(self, bucket: Bucket, flat: Tensor | None) -> bool:
        """Do this rank's part of sending a bucket. Returns whether it has one."""
        if flat is None:
            return False
        own: Any = None
        # What is packed for a failed publication has to be freed.
        if self._sends and self._stopped(looks=self._gathers) is None:
            own = self._sender.pack(bucket, flat)
        if self._gathers:
            self._packed[bucket.index] = own
        # What each rank packed, on rank 0.
        packed = {} if own is None else {self._sync.rank: own}
        if self._gathers and self.everywhere:
            what = f"what ranks pack of bucket {bucket.index}"
            words = self._sync.gather(what, "" if own is None else own, ranks=self._others)
            packed |= {rank: word for rank, word in zip(self._others, words[1:]) if word}
        if self._sync.rank == 0 and self.failure is None:
            self._bucket = bucket.index
            self._pending = on_rank0(self._calls).begin("send", bucket.index, packed)
        if self._sends:
            self._sender.send(bucket, flat, self._stopped)
        if self._sync.rank == 0:
            self._end_call()
        return self._sends or self._sync.rank == 0

    def finish(self, version: int | None) -> None:
        """Finish the publication (rank 0). Raises the failure, if it has failed.

        Args:
            version: of the weights; None for the base, which has none.
        """
        if self.failure is None:
            self._bucket += 1
            try:
                on_rank0(self._calls)("finish", version, self._sender.finish())
            except RlcoreError as error:
                self._fail(error)
        if self.failure is not None:
            raise self.failure

    def cancel(self) -> None:
        """Cancel the publication; the engines then lack a whole set of weights (rank 0)."""
        on_rank0(self._calls)("cancel")

    def end(self, *, done: bool) -> None:
        """End the publication on this rank, and free what engines have left unread."""
        if self._sends:
            stopped = None if done else self._stopped(looks=True)
            if stopped is not None and self._heard is not None:
                self._discard_from(*self._heard)
            self._sender.end(done=done, stopped=stopped)
        self._sends = False
        self._packed = {}

    def _discard_from(self, failed: int, stopped: Any) -> None:
        """Free what this rank has packed of the bucket that failed and of later ones.

        Only a process of its node can: the count of a handle's readers is in that node's memory.
        """
        for index, own in self._packed.items():
            if own is not None and index >= failed:
                self._sender.discard({self._sync.rank: own}, stopped if index == failed else None)

    def close(self) -> None:
        """Close this rank's connections to engines."""
        for sender in self._senders.values():
            sender.close()

    def _sender_of(self, transport: str) -> BucketSender:
        if transport not in self._senders:
            self._senders[transport] = self._make(transport)
        return self._senders[transport]

    # --- failures ---------------------------------------------------------------------------------

    def _stopped(self, *, looks: bool = False) -> Any:
        """The limit of what is still sent after a failure, else None.

        A rank asks several times a bucket. It looks into the store as often as a rank that waits,
        so that the number of requests does not depend on the number of buckets.

        Args:
            looks: look now.
        """
        if self._sync.rank == 0:
            if self._pending is not None and self._pending.done():
                self._end_call()
            return None if self._heard is None else self._heard[1]
        moment = time.monotonic()
        if self._heard is None and (looks or moment >= self._next_look):
            self._next_look = moment + self._sync.longest_pause_s
            store = self._sync.store
            key = f"publications/{self._number}/stopped"
            if store.check([key]):
                bucket, stopped = json.loads(store.get(key))
                self._heard = (bucket, stopped)
        return None if self._heard is None else self._heard[1]

    def _end_call(self) -> None:
        """Wait for the pending call."""
        call = self._pending
        self._pending = None
        if call is not None:
            try:
                on_rank0(self._calls).result(call)
            # recovery: gather to the end, then report the failure to every rank
            except RlcoreError as error:
                self._fail(error)

    def _fail(self, error: RlcoreError) -> None:
        """Record a failure, and let no rank send more than the engines wait for."""
        self.failure = error
        stop: Any = {}
        # After a missed deadline another call would wait as long again.
        if not isinstance(error, DeadlineExceeded):
            # recovery: no engine waits for anything any more
            with suppress(RlcoreError):
                stop = on_rank0(self._calls)("stop")
        self._heard = (self._bucket, stop)
        key = f"publications/{self._number}/stopped"
        self._sync.store.set(key, json.dumps(self._heard))
