"""Collectives of torch.distributed that gloo computes otherwise than Megatron expects of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def contiguous_scatter(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Make chunks contiguous: of others gloo's scatter sends the raw memory, silently."""

    def call(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        chunks = [chunk.contiguous() for chunk in scatter_list] if scatter_list else scatter_list
        return scatter(tensor, chunks, *args, **kwargs)

    return call


def uneven_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Gather parts of different sizes by a broadcast of each, since gloo refuses them.

    The tokens of an expert that is split over ranks are such parts.
    """

    def call(
        tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or _even(tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensor_list):
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)
        return None

    return call


def uneven_reduce_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Reduce and scatter parts of different sizes by a reduction of each."""

    def call(
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _even(input_list):
            return reduce_scatter(output, list(input_list), op=op, group=group, async_op=async_op)
        for rank, part in enumerate(input_list):
            if part.numel():
                total = part.clone()
                dist.reduce(total, op=op, group=group, group_dst=rank)
                if rank == dist.get_rank(group):
                    output.copy_(total)
        return None

    return call


def _even(parts: Sequence[Tensor]) -> bool:
    return len({part.shape for part in parts}) <= 1
