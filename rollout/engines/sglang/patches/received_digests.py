"""Has SGLang's schedulers compute a digest of all that they receive over a process group.

Runs in the engines' environment, which does not have rlcore: it imports nothing of ours. Nothing of
SGLang changes for requests of other clients. A scheduler does not wait for the digest of a bucket
before it takes the next one.

    request   load_format "flattened_bucket+digest:KIND:KEY": as "flattened_bucket", and the bucket
              goes into the update's digest of this order
    request   load_format "digests": no bucket; the answer's message is JSON, the digests of all
              tensor-parallel ranks
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

LOAD_FORMAT = "flattened_bucket"
ORDERED = f"{LOAD_FORMAT}+digest:"
DIGESTS = "digests"
SERVER_INFO = "rlcore_digests_of_updates"  # among the internal states of /server_info
NOT_LOADED = "not loaded: "  # in place of a digest, before the reason


def install(module: Any, others: Collection[str] = ()) -> None:
    """Wrap four methods of this process.

    Args:
        module: digests.py.
        others: names that the internal states show besides our own.
    """
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput as Answer
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController as InternalState,
    )
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Manager,
    )
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    receive = WeightUpdater._receive_bucketed_weights_from_distributed
    begin = Manager.begin_weight_update
    update = Manager.update_weights_from_distributed
    describe = InternalState._add_topology
    received = Received(module.Digest)

    def receive_and_digest(self: Any, **given: Any) -> Any:
        digest = received.digest()
        tensors = receive(self, **given)
        if digest is not None:
            digest.add(whole(tensors))
        return tensors

    def begin_and_forget(self: Any, request: Any) -> Any:
        received.clear()
        return begin(self, request)

    def update_and_digest(self: Any, request: Any) -> Any:
        if request.load_format == DIGESTS:
            found = _of_all_ranks(received.read(), self.tp_cpu_group)
            return Answer(success=True, message=json.dumps(found))
        if not (request.load_format or "").startswith(ORDERED):
            return update(self, request)
        received.order = request.load_format.removeprefix(ORDERED)
        request.load_format = LOAD_FORMAT
        try:
            answer = update(self, request)
        finally:
            received.order = None
        # SGLang sends rank 0's answer alone: nobody would hear of the others' failures
        if not answer.success:
            received.failure = received.failure or f"{NOT_LOADED}{answer.message}"
        return answer

    def describe_too(self: Any, state: dict[str, Any]) -> None:
        describe(self, state)
        state |= dict.fromkeys((SERVER_INFO, *others), True)

    WeightUpdater._receive_bucketed_weights_from_distributed = receive_and_digest
    Manager.begin_weight_update = begin_and_forget
    Manager.update_weights_from_distributed = update_and_digest
    InternalState._add_topology = describe_too


class Received:
    """What this rank received in the current update.

    Args:
        make: of a digest, from its order (`digests.Digest`).
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self._digest: Any = None
        self.order: str | None = None  # of the bucket that is being received
        self.failure = ""  # why a bucket was not loaded

    def digest(self) -> Any:
        """Return the digest for the bucket that comes next; None if it has no order."""
        if self.order is None:
            return None
        if self._digest is None or self._digest.order != self.order:
            self._digest = self._make(self.order)
        return self._digest

    def read(self) -> str:
        """Return the digest of the update's buckets, "" without any, or why one was not loaded."""
        return self.failure or ("" if self._digest is None else str(self._digest.read()))

    def clear(self) -> None:
        """Begin an update."""
        self._digest = None
        self.failure = ""


def whole(tensors: Any) -> Any:
    """The bytes of which the tensors of a bucket are views: uint8 [n]."""
    first = tensors[0][1]
    none = torch.empty(0, dtype=torch.uint8, device=first.device)
    return none.set_(first.untyped_storage())


def _of_all_ranks(own: str, group: Any) -> list[str]:
    """The digests of all ranks, in their order."""
    ranks = [own] * dist.get_world_size(group)
    if len(ranks) > 1:
        dist.all_gather_object(ranks, own, group=group)
    return ranks
