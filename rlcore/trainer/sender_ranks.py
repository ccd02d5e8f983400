"""Ranks beside rank 0 that send weights, each to engines of its own, and ranks that help them.

Rank 0 assigns the engines to ranks, talks to them, and judges the publication. The other ranks open
the groups that it orders, send what it sends, and learn through the store when it has given up.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping

from torch import Tensor

from rlcore.interfaces import BucketSender, RankPlace
from rlcore.trainer.rank_sync import RankSync
from rlcore.weights import Bucket


class SenderRanks:
    """Brings the orders of rank 0 to the ranks. Every rank makes one, and then the same calls."""

    def __init__(self, sync: RankSync, sender: BucketSender) -> None:
        self._sync = sync
        self._sender = sender
        self._opened = 0
        self.serves = False  # whether this rank serves engines, in the current publication
        # on rank 0
        own = json.dumps(RankPlace(socket.gethostname(), sender.gpu))
        words = sync.gather("the places of the ranks", own)
        self.places = [RankPlace(*json.loads(word)) for word in words]

    def open(
        self, orders: Mapping[int, str], meet: Callable[[Mapping[int, str]], str], timeout_s: float
    ) -> str:
        """Begin a publication. Returns the answer of `meet` on every rank, "" without orders.

        Args:
            orders: for the ranks that send or help, the same on every rank.
            meet: run on rank 0, with the answers of those ranks.
        """
        self._opened += 1
        own = orders.get(self._sync.rank)
        self.serves = own is not None
        if not orders:
            return ""
        word = "" if own is None else self._sender.open(own)
        words = self._sync.gather("where ranks meet their engines", word, ranks=[*orders])
        places = dict(zip(orders, words[1:]))  # the first word is rank 0's own
        told = self._sync.broadcast("the ranks' places", lambda: json.dumps(places))
        if self.serves:
            self._sender.enter({int(rank): place for rank, place in json.loads(told).items()})
        return self._sync.broadcast(
            "meeting the engines", lambda: meet(places), timeout_s=timeout_s
        )

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        """Send a bucket to the engines that this rank serves, or pass it on."""
        self._sender.send(bucket, flat, self._given_up)

    def give_up(self, stop_order: str) -> None:
        """Let no rank send more than `WeightSink.stop_order` says (rank 0)."""
        self._sync.store.set(self._key, stop_order)

    def abandon(self) -> None:
        """End a publication that was not finished."""
        if self.serves:
            self._sender.abandon()

    def close(self) -> None:
        """Close this rank's connections to engines."""
        self._sender.close()

    @property
    def _key(self) -> str:
        return f"senders/{self._opened}/given up"

    def _given_up(self) -> str | None:
        store = self._sync.store
        return store.get(self._key).decode() if store.check([self._key]) else None
