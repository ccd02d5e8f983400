"""Has SGLang's schedulers compute the digest of each bucket that they receive over a process group.

Runs in the engines' environment, which does not have rlcore: it imports nothing of ours but
digests.py, by its path. Nothing of SGLang changes for requests of other clients.

    request   load_format "flattened_bucket+digest:KIND:KEY"
    answer    its message ends with DIGESTS_MARK and the digests of all tensor-parallel ranks
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

LOAD_FORMAT = "flattened_bucket"
ORDERED = f"{LOAD_FORMAT}+digest:"
DIGESTS_MARK = "; digests "
SERVER_INFO = "rlcore_bucket_digests"  # among the internal states of /server_info
NONE = "none"  # of a rank that received no bucket


def install(told: Collection[str] = ()) -> None:
    """Wrap three methods of this process.

    Args:
        told: names among the internal states beside our own.
    """
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController as InternalState,
    )
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Manager,
    )
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    digest = _digests().digest
    receive = WeightUpdater._receive_bucketed_weights_from_distributed
    update = Manager.update_weights_from_distributed
    describe = InternalState._add_topology
    current: dict[str, str] = {}  # the order of the bucket that is being received, and its digest

    def receive_and_digest(self: Any, **given: Any) -> Any:
        tensors = receive(self, **given)
        if "order" in current:
            current["digest"] = digest(current["order"], _whole(tensors))
        return tensors

    def update_and_tell(self: Any, request: Any) -> Any:
        if not (request.load_format or "").startswith(ORDERED):
            return update(self, request)
        current["order"] = request.load_format.removeprefix(ORDERED)
        request.load_format = LOAD_FORMAT
        try:
            answer = update(self, request)
            found = _of_all_ranks(current.get("digest", NONE), self.tp_cpu_group)
        finally:
            current.clear()
        answer.message += DIGESTS_MARK + ",".join(sorted(set(found)))
        return answer

    def describe_too(self: Any, state: dict[str, Any]) -> None:
        describe(self, state)
        state |= dict.fromkeys((SERVER_INFO, *told), True)

    WeightUpdater._receive_bucketed_weights_from_distributed = receive_and_digest
    Manager.update_weights_from_distributed = update_and_tell
    InternalState._add_topology = describe_too


def _whole(tensors: Any) -> Any:
    """The bytes of which the tensors of a bucket are views: uint8 [n]."""
    first = tensors[0][1]
    none = torch.empty(0, dtype=torch.uint8, device=first.device)
    return none.set_(first.untyped_storage())


def _of_all_ranks(own: str, group: Any) -> list[str]:
    size = dist.get_world_size(group)
    if size == 1:
        return [own]
    found = [NONE] * size
    dist.all_gather_object(found, own, group=group)
    return found


def _digests() -> Any:
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(here, "..", "..", "weight_sync", "digests.py")
    spec = importlib.util.spec_from_file_location("rlcore_digests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
