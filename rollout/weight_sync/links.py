"""Engines in other processes take each bucket over process groups (process_group.py).

Each engine has a group of its own with one rank of the trainer, which sends it every bucket, and
with the ranks that help the sender (groups/assignment.py). All links send at once. A hung engine
blocks only its sender, and only until rank 0 cancels the publication.

An engine that queues calls is called for a bucket when the one before it begins to leave, so that
it goes on to the next bucket without a round trip to the trainer. A failure therefore shows at a
later bucket, or in `complete`, and each engine that has not failed receives all buckets for which
it was called.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import EngineFailed
from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, Transport, ask
from rollout.weight_sync.digests import Digest, new_order
from rollout.weight_sync.groups.assignment import SenderAssignment, Served
from rollout.weight_sync.groups.link import EngineLink, Link, RemoteLink
from rollout.weight_sync.process_group import choose_backend, gpu_identity

NOT_LOADED = "not loaded: "  # of SGLang's ranks, in place of a digest, before the reason
NOT_VERIFIED = (
    "the weights that engine %s receives are not verified: it computes no digests; start it by"
    " `rlcore engine`, whose servers do"
)
logger = logging.getLogger(__name__)


class DistributedTransport(Transport):
    """Broadcasts the weights in a group with each engine, which has these members:

        url           where it is reached; the way there tells which address of ours it can reach
        group_ranks   the ranks of the group that are its own: its tensor-parallel ranks
        in_group      the name of its group; None again after a start or a new connection
        join_group(address, rank)
                      leaves its group and enters another, with the ranks from `rank` on; returns
                      when all ranks of the group are there
        receive_bucket(index, None)
                      receives bucket `index` over the group, and loads it
        health()      tells under `gpu` what identifies its GPU; None stands for the CPU, and for a
                      GPU that it shares with the trainer

    and, if its `digests_weights` is true, `receive_bucket(index, None, order)` for a digest of all
    that it receives (digests.py), and `received_digests()`: those of its ranks since
    `begin_update`, in their order. If its `queues_buckets` is true, it takes `receive_bucket` of
    later buckets while it receives one, and receives in the order of the indices, whatever order
    the calls come in; a call that was posted ahead has `CALLS_AT_ONCE` times its limit.

    Args:
        senders, rails: see `SenderAssignment`.
    """

    name = "distributed"

    def __init__(
        self,
        *,
        device: torch.device,
        timeout_s: float,
        probe_s: float,
        senders: int | None = None,
        rails: int | None = None,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._device = device
        self._probe_s = probe_s
        self._links: dict[Engine, EngineLink] = {}
        self._assignment = SenderAssignment(senders, rails, on_gpu=device.type == "cuda")
        # in the current transaction
        self._sent: dict[str, Digest] = {}  # of what was sent, by kind
        self._buckets: Sequence[Bucket] = ()
        self._sending = -1  # the newest bucket that was begun
        self._failed: Failures = {}

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Join a group with each engine, unless one from an earlier publication is still whole.

        Engines that other ranks serve come to their groups in `meet`.
        """
        for engine in [engine for engine, link in self._links.items() if not link.is_whole]:
            self._links.pop(engine).close()
        if self.has_all_engines:
            self._assignment.keep_only(engines)
        new = [engine for engine in engines if engine not in self._links]
        answers = await ask(new, "health", lambda e: e.health(), self._probe_s)
        failed = answers.failed
        # one that joined may be alone in this transaction
        known = len({*self._assignment.served, *engines})
        for engine in [engine for engine in new if engine in answers.results]:
            gpu = answers.results[engine]["gpu"]
            try:
                served = self._assignment.assign(engine, gpu, known, self.trainer_ranks)
            except EngineFailed as error:  # recovery: without this engine, by the caller
                failed[engine] = f"engine {engine.name} cannot be met: {error}"
                continue
            self._links[engine] = self._new_link(engine, gpu, served)
        self._engines = [engine for engine in engines if engine not in failed]
        self._buckets = buckets
        self._sending = -1
        kinds = {kind for engine in self._engines if (kind := self._kind(engine))}
        self._sent = {kind: Digest(new_order(kind)) for kind in sorted(kinds)}
        for link in self._links_now():
            link.begin()
        self._failed = failed | await self._on_links(lambda link: link.join())
        return self._failed

    def _new_link(self, engine: Engine, gpu: str | None, served: Served) -> EngineLink:
        if not getattr(engine, "digests_weights", False):
            logger.warning(NOT_VERIFIED, engine.name)
        if served.sender:
            backend = choose_backend(self.trainer_ranks[served.sender].gpu, gpu)
            return RemoteLink(engine, backend, served, self._device, self._timeout_s)
        backend = choose_backend(gpu_identity(self._device), gpu)
        return Link(engine, backend, self._device, self._timeout_s)

    @property
    def orders(self) -> dict[int, str]:
        """What `RankSender.open` of each rank that serves engines of this transaction is told."""
        remote: dict[int, list[dict[str, Any]]] = {}
        for link in self._links_now():
            if isinstance(link, RemoteLink) and link.order is not None:
                for place, rank in enumerate(link.order.trainer):
                    if rank:  # what rank 0 does is in its link
                        own = replace(link.order, rank=place)
                        remote.setdefault(rank, []).append(asdict(own))
        return {rank: json.dumps(orders) for rank, orders in remote.items()}

    async def meet(self, places: Mapping[int, str]) -> Failures:
        """Have engines enter the groups that other ranks have opened for them.

        Who does not get there is served by rank 0 from then on.
        """
        remote = [link for link in self._links_now() if isinstance(link, RemoteLink)]
        reasons = await asyncio.gather(*(link.meet(places) for link in remote))
        failed = {link.engine: why for link, why in zip(remote, reasons) if why is not None}
        for engine in failed:
            self._assignment.leave_to_rank0(engine)
            self._links.pop(engine).close()
        self._failed |= failed
        return failed

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Broadcast the bucket in all groups at once."""
        self._sending = bucket.index
        flat = self._on_host(flat)
        called = [one.index for one in self._buckets[bucket.index : bucket.index + 2]]
        sending = self._on_links(lambda link: link.send(called, self._order(link.engine), flat))
        digesting = asyncio.to_thread(self._digest, flat) if self._sent else asyncio.sleep(0)
        failed, _ = await asyncio.gather(sending, digesting)
        self._failed |= failed
        return failed

    def _digest(self, flat: Tensor) -> None:
        for digest in self._sent.values():
            digest.add(flat)
            digest.wait()

    def _on_host(self, flat: Tensor) -> Tensor:
        """The bytes where all groups take them, copied once for all."""
        gloo = all(link.backend == "gloo" for link in self._links_now())
        return flat.cpu() if gloo else flat

    async def send_called(self, bucket: Bucket, flat: Tensor) -> Failures:
        """See `Transport.send_called`."""
        waiting = [
            link
            for link in self._links_now()
            if self._sending < bucket.index <= link.last and link.engine not in self._failed
        ]
        if not waiting:
            return {}
        flat = self._on_host(flat)
        reasons = await asyncio.gather(*(link.send_called(flat) for link in waiting))
        failed = {link.engine: why for link, why in zip(waiting, reasons) if why is not None}
        self._failed |= failed
        return failed

    @property
    def stop_order(self) -> str:
        """See `Transport.stop_order`."""
        return json.dumps(
            {
                engine.name: self._links[engine].last
                for engine in self._engines
                if engine in self._links and engine not in self._failed
            }
        )

    async def complete(self) -> Failures:
        """Compare the digests of what the engines received with those of what was sent."""
        failed = await self._on_links(lambda link: link.settle())
        self._failed |= failed
        if failed:
            return failed
        failed = await self._compare()
        self._failed |= failed
        return failed

    async def _compare(self) -> Failures:
        asked = [engine for engine in self._engines if self._kind(engine)]
        what = "received_digests"
        answers = await ask(asked, what, lambda e: e.received_digests(), self._timeout_s)
        sent = {kind: digest.read() for kind, digest in self._sent.items()}
        failed = answers.failed
        for engine, received in answers.results.items():
            why = difference(sent[str(self._kind(engine))], received, engine.group_ranks)
            if why is not None:
                failed[engine] = f"engine {engine.name}: {why}"
        return failed

    async def give_up(self) -> Failures:
        """Wait until the engines that have not failed are at the end of what they were called for.

        Another one of them may fail there.
        """
        self._engines = [
            engine
            for engine in self._engines
            if engine in self._links and engine not in self._failed
        ]
        failed = await self._on_links(lambda link: link.settle())
        for link in self._links_now():
            if isinstance(link, RemoteLink):  # the other ranks leave these groups, too
                link.close()
        return failed

    def _kind(self, engine: Engine) -> str | None:
        """The kind of digest that the engine computes, if it does."""
        if not getattr(engine, "digests_weights", False):
            return None
        return "linear" if self._links[engine].backend == "nccl" else "xxh3"

    def _order(self, engine: Engine) -> str | None:
        kind = self._kind(engine)
        return None if kind is None else self._sent[kind].order

    async def close(self) -> None:
        """Close all groups."""
        await super().close()
        for link in self._links.values():
            link.close()
        self._links = {}

    def _links_now(self) -> list[EngineLink]:
        return [self._links[engine] for engine in self._engines]

    async def _on_links(self, step: Callable[[EngineLink], Any]) -> Failures:
        reasons = await asyncio.gather(*map(step, self._links_now()))
        return {engine: why for engine, why in zip(self._engines, reasons) if why is not None}


def difference(sent: str, received: Sequence[str], ranks: int) -> str | None:
    """Compare the digests of an engine's ranks with that of what was sent; None if they agree."""
    if len(received) != ranks:
        return f"digests of {len(received)} ranks, expected {ranks}"
    for rank, digest in enumerate(received):
        if digest.startswith(NOT_LOADED):
            return f"its rank {rank} received the weights, but did not load them: {digest}"
        if digest != sent:
            return (
                f"its rank {rank} did not receive the weights as they were sent, so something"
                f" between trainer and engine changes them (digest sent {sent[:12]}, received"
                f" {digest[:12] or 'none'})"
            )
    return None
