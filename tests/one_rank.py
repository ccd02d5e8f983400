"""A trainer of one rank that publishes step by step, over engines on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed import HashStore

from rlcore.config import Config
from rlcore.deadlines import CLOSE_ENGINES_S
from rlcore.interfaces import RankAddress
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import PublicationCalls, SenderRanks
from rlcore.weights import Bucket
from rollout.fleet.publication import WeightPublication
from rollout.weight_sync.choose import make_sender

LIMIT_S = 300.0


def calls_of(
    publication: WeightPublication, loop: asyncio.AbstractEventLoop, limit_s: float = LIMIT_S
) -> PublicationCalls:
    """The calls of a publication in this process."""

    def begin(method: str, *arguments: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(publication, method)(*arguments), loop)

    return PublicationCalls(begin, limit_s)


class OneRank:
    """Publishes to the engines of `fleet`. Its methods raise what went wrong."""

    def __init__(self, config: Config, fleet: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.publication = WeightPublication(config, fleet)
        self._loop = loop
        self.ranks = SenderRanks(
            RankSync(HashStore(), 0, 1, timeout_s=LIMIT_S),
            make=lambda transport: make_sender(transport, config, torch.device("cpu")),
            address=RankAddress("this-machine"),
            calls=calls_of(self.publication, loop),
        )

    @property
    def sender(self) -> Any:
        """Of the transport in use."""
        return self.ranks._sender

    def prepare(
        self, buckets: Sequence[Bucket], *, only_stale: bool = False, is_base: bool = False
    ) -> bool:
        """Open a publication; False where no engine lacks the base."""
        orders = self.ranks.order(buckets, only_stale=only_stale, is_base=is_base)
        if orders is not None:
            self.ranks.open(orders[0], buckets)
        return orders is not None

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.ranks.send(bucket, flat)
        if self.ranks.failure is not None:
            raise self.ranks.failure

    def send_after_a_failure(self, bucket: Bucket, flat: torch.Tensor) -> None:
        assert self.ranks.failure is not None
        self.ranks.send(bucket, flat)

    def finish(self, version: int | None) -> None:
        self.ranks.finish(version)
        self.ranks.end(done=True)

    def cancel(self) -> None:
        self.ranks.cancel()
        self.ranks.end(done=False)

    def close(self) -> None:
        self.ranks.close()
        asyncio.run_coroutine_threadsafe(self.publication.close(), self._loop).result(
            CLOSE_ENGINES_S
        )
