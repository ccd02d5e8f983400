"""Batches and vectors between rank 0 and the replicas, over gloo and without pickling.

Down: rank 0 sends each data-parallel rank's share to one rank of its replica, which broadcasts it
there. Up: one rank of each replica's last stage sends its results to rank 0. With one process
nothing is copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from backends.megatron.parallel.state import ParallelState

# a view of the flat buffer as int64 or float64 must start at a multiple of its size
_ALIGNMENT = 8


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


def scatter_shares(
    shares: Sequence[Mapping[str, Tensor]] | None, parallel: ParallelState
) -> dict[str, Tensor]:
    """Send the CPU tensors `shares[d]` of rank 0 to every rank of replica d. Collective.

    Other ranks pass None.
    """
    if parallel.world_size == 1:
        assert shares is not None
        return dict(shares[0])
    layouts = None
    if shares is not None:
        layouts = [
            [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in s.items()]
            for s in shares
        ]
    layouts = broadcast_json(layouts, 0, parallel.control_group)
    layout = layouts[parallel.dp_rank]
    flat = torch.empty(0, dtype=torch.uint8)
    if shares is not None:
        flat = _flatten(shares[0])
        for share, leader in list(zip(shares, parallel.replica_leaders))[1:]:
            dist.send(_flatten(share), leader, group=parallel.control_group)
    else:
        flat = torch.empty(_num_bytes(layout), dtype=torch.uint8)
        if parallel.rank == parallel.replica_leaders[parallel.dp_rank]:
            dist.recv(flat, 0, group=parallel.control_group)
    if parallel.replica_group.size() > 1:
        dist.broadcast(
            flat, parallel.replica_leaders[parallel.dp_rank], group=parallel.replica_group
        )
    return _views(flat, layout)


def gather_rows(
    own: Tensor | None, sizes: Sequence[tuple[int, int]], parallel: ParallelState
) -> list[Tensor] | None:
    """Gather a tensor of each replica's last stage to rank 0, in the order of the replicas.

    Collective; returns None on other ranks.

    Args:
        own: this rank's results, fp32 [k, M_d]; used on the source rank of each replica only.
        sizes: (k, M_d) of each replica; used on rank 0 only.
    """
    source = parallel.score_sources[parallel.dp_rank]
    if parallel.rank == 0:
        gathered = []
        for rank, (k, m) in zip(parallel.score_sources, sizes):
            if rank == 0:
                assert own is not None
                gathered.append(own)
            else:
                gathered.append(torch.empty(k, m))
                dist.recv(gathered[-1], rank, group=parallel.control_group)
        return gathered
    if parallel.rank == source:
        assert own is not None
        dist.send(own.contiguous(), 0, group=parallel.control_group)
    return None


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _flatten(share: Mapping[str, Tensor]) -> Tensor:
    flat = torch.empty(
        sum(_padded(t.numel() * t.itemsize) for t in share.values()), dtype=torch.uint8
    )
    at = 0
    for tensor in share.values():
        data = tensor.contiguous().view(-1).view(torch.uint8)
        flat[at : at + data.numel()] = data
        at += _padded(data.numel())
    return flat


def _sizes(layout: Sequence[Any]) -> list[tuple[str, torch.dtype, list[int], int]]:
    out = []
    for name, dtype_name, shape in layout:
        dtype = getattr(torch, dtype_name)
        out.append((name, dtype, shape, torch.Size(shape).numel() * dtype.itemsize))
    return out


def _num_bytes(layout: Sequence[Any]) -> int:
    return sum(_padded(num_bytes) for *_, num_bytes in _sizes(layout))


def _views(flat: Tensor, layout: Sequence[Any]) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    at = 0
    for name, dtype, shape, num_bytes in _sizes(layout):
        views[name] = flat[at : at + num_bytes].view(dtype).view(shape)
        at += _padded(num_bytes)
    return views
