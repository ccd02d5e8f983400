"""The trainer's side of a publication: each rank gets its orders from the engines' side, and sends.

Rank 0 calls the engines' side, brings orders and answers to and fro, and otherwise sends as every
rank does. It learns of a failure as the result of a call, and the other ranks through the store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlcore.errors import DeadlineExceeded, PartLost, PublicationFailed, RlcoreError
from rlcore.interfaces import BucketSender, Orders, RankAddress
from rlcore.trainer.rank_sync import RankSync, on_rank0
from rlcore.weights import Bucket


@dataclass(frozen=True)
class PublicationCalls:
    """Rank 0's calls of the `WeightPublication` beside the engines, in whatever process that is.

    Args:
        begin: begins a call of one of its methods. For "open" it replaces a lost service first.
        limit_s: for one call. Each step has deadlines of its own; this one is for a blocked loop.
    """

    begin: Callable[..., Future[Any]]
    limit_s: float

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Return the result of a call."""
        return self.result(self.begin(method, *arguments))

    def result(self, call: Future[Any]) -> Any:
        """Wait for a call. Raises PublicationFailed where the service is lost meanwhile."""
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
    """A rank's part in all publications. Every rank makes one, and then the same calls.

    Args:
        make: makes this rank's sender for a transport.
        calls: on rank 0.
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
        words = sync.gather("the addresses of the ranks", json.dumps(address))
        # on rank 0
        self.addresses = [RankAddress(*json.loads(word)) for word in words]
        # in the current publication
        self._number = 0
        self._sender = BucketSender()
        # whether this rank sends
        self._sends = False
        # the other ranks that do, beside rank 0
        self._others: list[int] = []
        self._gathers = False
        # on rank 0: its own answer to its order, the call that is not answered, the first failure
        self._answers: dict[int, Any] = {}
        self._pending: Future[Any] | None = None
        self.failure: RlcoreError | None = None
        self._stop: Any = None

    @property
    def everywhere(self) -> bool:
        """Whether ranks other than rank 0 need the buckets."""
        return bool(self._others)

    def order(self, buckets: Sequence[Bucket], *, only_stale: bool) -> str:
        """Open a publication at the engines, and rank 0's part in it. Returns the other ranks'.

        What rank 0 is ordered stays here: the keys of digests must not be in the store.
        """
        self.failure = None
        self._stop = None
        calls = on_rank0(self._calls)
        orders: Orders = calls("open", buckets, self.addresses, only_stale)
        self._sends = 0 in orders.ranks
        self._sender = self._sender_of(orders.transport)
        self._answers = {}
        if self._sends:
            self._answers[0] = self._sender.open(orders.ranks[0], buckets)
        others = {rank: order for rank, order in orders.ranks.items() if rank}
        if orders.joins and not others:
            calls("join", self._answers)
        return json.dumps([orders.transport, list(others.items()), orders.joins, orders.gathers])

    def open(
        self,
        order: str,
        buckets: Sequence[Bucket],
        join: Callable[[Mapping[int, Any]], str],
        timeout_s: float,
    ) -> str:
        """Begin a publication. Returns the answer of `join` on every rank, "" without one.

        Args:
            order: of `order`.
            join: run on rank 0, with the answers of the ranks.
        """
        transport, others, joins, self._gathers = json.loads(order)
        orders = dict(others)
        self._others = [*orders]
        self._number += 1
        rank = self._sync.rank
        own: Any = None
        if rank:
            self._sends = rank in orders
            if self._sends:
                self._sender = self._sender_of(transport)
                own = self._sender.open(orders[rank], buckets)
        if not (joins and orders):
            return ""
        words = self._sync.gather("the ranks' rendezvous", json.dumps(own), ranks=self._others)
        # the first word is rank 0's own
        self._answers |= zip(self._others, map(json.loads, words[1:]))
        said = self._sync.broadcast(
            "every rank's rendezvous", lambda: json.dumps(list(self._answers.items()))
        )
        if self._sends:
            self._sender.enter(dict(json.loads(said)))
        return self._sync.broadcast(
            "joining the engines", lambda: join(self._answers), timeout_s=timeout_s
        )

    def join(self, answers: Mapping[int, Any]) -> None:
        """Have the engines join the groups of the ranks (rank 0)."""
        on_rank0(self._calls)("join", answers)

    def send(self, bucket: Bucket, flat: Tensor | None) -> bool:
        """Take this rank's part in a bucket. Returns whether it has one."""
        if flat is None:
            return False
        packed = self._pack(bucket, flat)
        begun = self._sync.rank == 0 and self.failure is None
        if begun:
            self._pending = on_rank0(self._calls).begin("send", bucket.index, packed)
        if self._sends:
            self._sender.send(bucket, flat, self._stopped)
        if self._sync.rank == 0:
            self._end_call()
            if self.failure is not None and self._gathers:
                self._sender.discard(packed, self._stop if begun else None)
        return self._sends or self._sync.rank == 0

    def _pack(self, bucket: Bucket, flat: Tensor) -> dict[int, Any]:
        """Return what each rank packed, on rank 0."""
        own = self._sender.pack(bucket, flat) if self._sends and self._stopped() is None else None
        packed = {} if own is None else {self._sync.rank: own}
        if self._gathers and self._others:
            what = f"what ranks pack of bucket {bucket.index}"
            words = self._sync.gather(what, "" if own is None else own, ranks=self._others)
            packed |= {rank: word for rank, word in zip(self._others, words[1:]) if word}
        return packed

    def finish(self, version: int) -> None:
        """End a publication that went well so far as `version` (rank 0)."""
        if self.failure is None:
            try:
                on_rank0(self._calls)("finish", version, self._sender.finish())
            except RlcoreError as error:
                self._fail(error)

    def cancel(self) -> None:
        """Give up a publication: the engines are then without whole weights (rank 0)."""
        on_rank0(self._calls)("cancel")

    def end(self, *, done: bool) -> None:
        """End the publication on this rank."""
        if self._sends:
            self._sender.end(done=done, stopped=None if done else self._stopped())
        self._sends = False

    def close(self) -> None:
        """Close this rank's connections to engines."""
        for sender in self._senders.values():
            sender.close()

    def _sender_of(self, transport: str) -> BucketSender:
        if transport not in self._senders:
            self._senders[transport] = self._make(transport)
        return self._senders[transport]

    # --- failures ---------------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        return f"publications/{self._number}/stopped"

    def _stopped(self) -> Any:
        """What is still sent, once the publication has failed; else None."""
        if self._sync.rank == 0:
            if self._pending is not None and self._pending.done():
                self._end_call()
            return self._stop
        store = self._sync.store
        return json.loads(store.get(self._key)) if store.check([self._key]) else None

    def _end_call(self) -> None:
        """Wait for the call that is not answered."""
        call = self._pending
        self._pending = None
        if call is not None:
            try:
                on_rank0(self._calls).result(call)
            # recovery: gather to the end, then every rank learns of it
            except RlcoreError as error:
                self._fail(error)

    def _fail(self, error: RlcoreError) -> None:
        """Let no rank send more than engines wait for."""
        self.failure = error
        try:
            self._stop = on_rank0(self._calls)("stop")
        # recovery: no engine waits for anything any more
        except RlcoreError:
            self._stop = {}
        self._sync.store.set(self._key, json.dumps(self._stop))
