"""Agreement of the ranks on errors, on a value of one rank, and on a list of names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from backends.megatron.parallel.state import ParallelState
from rlcore.errors import FailedElsewhere


@contextmanager
def raise_on_all_ranks(parallel: ParallelState, what: str) -> Iterator[None]:
    """Inside, work may fail on one rank: either all ranks succeed or all raise.

    The failing rank raises its own error, the others FailedElsewhere naming `what` and the rank. If
    the work itself communicates, this covers only failures after its last communication: a peer
    that waits for a failed rank gets the group's timeout.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # re-raised below, after the other ranks know
        failure = error
    failed = torch.tensor([parallel.world_size if failure is None else parallel.rank])
    dist.all_reduce(failed, op=dist.ReduceOp.MIN, group=parallel.control_group)
    if failure is not None:
        raise failure
    if int(failed) < parallel.world_size:
        raise FailedElsewhere(f"{what} failed on rank {int(failed)}; its log has the reason")


def broadcast_json(value: Any, source: int, group: ProcessGroup) -> Any:
    """Send a small JSON-able value from global rank `source` to all ranks of a gloo group."""
    own = dist.get_rank() == source
    data = torch.empty(0, dtype=torch.uint8)
    if own:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, source, group=group)
    if not own:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, source, group=group)
    return value if own else json.loads(data.numpy().tobytes())


def union_of_names(names: Sequence[str], group: ProcessGroup, device: torch.device) -> list[str]:
    """Return the names that any rank of a group has, sorted; the same on all. Collective.

    If all ranks have the same names, as usual, this costs one small reduction.

    Args:
        device: the device of the group's tensors.
    """
    own = json.dumps(sorted(names)).encode()
    digest = int.from_bytes(hashlib.blake2b(own, digest_size=7).digest(), "little")
    bounds = torch.tensor([digest, -digest, len(own)], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    highest, negated_lowest, longest = bounds.tolist()
    if highest == -negated_lowest:
        return sorted(names)
    padded = torch.frombuffer(bytearray(own.ljust(longest)), dtype=torch.uint8).to(device)
    found = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, padded, group=group)
    return sorted({name for one in found for name in json.loads(one.cpu().numpy().tobytes())})
