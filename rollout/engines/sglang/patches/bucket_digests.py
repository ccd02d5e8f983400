"""Has SGLang's schedulers compute the digest of each bucket that they receive over a process group.

Runs in the engines' environment, which does not have rlcore: it imports nothing of ours. Nothing of
SGLang changes for requests of other clients. A scheduler does not wait for the digest of a bucket
before it takes the next one, and tells all of an update's digests when it is asked.

    request   load_format "flattened_bucket+digest:KIND:KEY": as "flattened_bucket", and a digest
    request   load_format "digests": no bucket; the answer's message is JSON, {order: digest} with
              the orders KIND:KEY since the update began, and the digests of all tensor-parallel
              ranks, one if they are the same
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

LOAD_FORMAT = "flattened_bucket"
ORDERED = f"{LOAD_FORMAT}+digest:"
ALL_DIGESTS = "digests"
SERVER_INFO = "rlcore_digests_of_updates"  # among the internal states of /server_info
NONE = "none"  # of a rank that received no bucket


def install(module: Any, told: Collection[str] = ()) -> None:
    """Wrap four methods of this process.

    Args:
        module: digests.py.
        told: names among the internal states beside our own.
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
    digests = Digests(module.Digest)

    def receive_and_digest(self: Any, **given: Any) -> Any:
        one = digests.begin(torch.device(self.device))
        tensors = receive(self, **given)
        if one is not None:
            one.take(whole(tensors))
        return tensors

    def begin_anew(self: Any, request: Any) -> Any:
        digests.clear()
        return begin(self, request)

    def update_and_digest(self: Any, request: Any) -> Any:
        if request.load_format == ALL_DIGESTS:
            found = _of_all_ranks(digests.read_all(), self.tp_cpu_group)
            return Answer(success=True, message=json.dumps(found))
        if not (request.load_format or "").startswith(ORDERED):
            return update(self, request)
        digests.order = request.load_format.removeprefix(ORDERED)
        request.load_format = LOAD_FORMAT
        try:
            answer = update(self, request)
            # SGLang sends rank 0's answer alone: the others' failures would be told to nobody
            if not answer.success:
                digests.fail(answer.message)
            return answer
        finally:
            digests.order = None
            digests.read_earlier()

    def describe_too(self: Any, state: dict[str, Any]) -> None:
        describe(self, state)
        state |= dict.fromkeys((SERVER_INFO, *told), True)

    WeightUpdater._receive_bucketed_weights_from_distributed = receive_and_digest
    Manager.begin_weight_update = begin_anew
    Manager.update_weights_from_distributed = update_and_digest
    InternalState._add_topology = describe_too


class Digests:
    """The digests of one update's buckets on this rank. Only the newest may wait for the device.

    Args:
        make: of a digest, from its order and the device (`digests.Digest`).
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self.order: str | None = None  # of the bucket that is being received
        self._unread: dict[str, Any] = {}
        self._found: dict[str, str] = {}

    def begin(self, device: torch.device) -> Any:
        """Make the digest of the next bucket; None if it has no order."""
        if self.order is None:
            return None
        self._unread[self.order] = self._make(self.order, device)
        return self._unread[self.order]

    def fail(self, why: str) -> None:
        """Tell why the bucket that is being received was not loaded, in place of its digest."""
        assert self.order is not None
        self._unread.pop(self.order, None)
        self._found[self.order] = f"not loaded: {why}"

    def read_earlier(self) -> None:
        """Read all digests but the newest, whose bucket may be on its way."""
        for order in list(self._unread)[:-1]:
            self._found[order] = self._unread.pop(order).read()

    def read_all(self) -> dict[str, str]:
        """Read all digests of the update, by order."""
        for order in list(self._unread):
            self._found[order] = self._unread.pop(order).read()
        return self._found

    def clear(self) -> None:
        """Begin an update."""
        self._unread = {}
        self._found = {}


def whole(tensors: Any) -> Any:
    """The bytes of which the tensors of a bucket are views: uint8 [n]."""
    first = tensors[0][1]
    none = torch.empty(0, dtype=torch.uint8, device=first.device)
    return none.set_(first.untyped_storage())


def _of_all_ranks(own: dict[str, str], group: Any) -> dict[str, str]:
    """For each order the different digests of the ranks, joined by commas."""
    ranks = [own] * dist.get_world_size(group)
    if len(ranks) > 1:
        dist.all_gather_object(ranks, own, group=group)
    orders = {order: None for rank in ranks for order in rank}
    return {order: ",".join(sorted({rank.get(order, NONE) for rank in ranks})) for order in orders}
