"""The exchange between context-parallel ranks: keys, values, and the results of the head."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_keys_values(key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values: [T, groups, d] each -> [CP * T, groups, d], rank behind rank.

    The backward pass sums the gradients from all ranks' queries.
    """
    if group.size() == 1:
        return key, value
    both = gather_from_sequence_parallel_region(
        torch.cat((key, value), -1), tensor_parallel_output_grad=True, group=group
    )
    gathered: tuple[Tensor, Tensor] = both.split((key.size(-1), value.size(-1)), -1)
    return gathered


def gather_targets(output: Any, own: Tensor, total: int, group: ProcessGroup) -> Any:
    """Gather the head's results for all targets of the micro-batch, on every rank. Differentiable.

    Args:
        output: a tensor [m] of this rank's targets, or a tuple of such tensors and Nones.
        own: int64 [m], their indices among the `total` targets.
    """
    if group.size() == 1:
        return output
    if isinstance(output, Tensor):
        return _GatherTargets.apply(output[None], own, total, group)[0]
    rows = iter(
        _GatherTargets.apply(torch.stack([x for x in output if x is not None]), own, total, group)
    )
    return tuple(None if x is None else next(rows) for x in output)


class _GatherTargets(torch.autograd.Function):
    """Gather [k, m] -> [k, M].

    The backward pass takes the own part and sums nothing: every rank has the whole loss, and
    Megatron's DDP adds the gradients of the context-parallel ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, own: Tensor, total: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = part.new_zeros(part.size(0), total)
        whole[:, own] = part
        if total:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return gradients[0].index_select(1, own), None, None, None
