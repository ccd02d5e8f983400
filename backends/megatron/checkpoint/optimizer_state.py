"""Optimizer state in a checkpoint, independent of the layout and the kind of optimizer.

The moments of each parameter, and its master weights if it is narrower than fp32, are stored in the
shape of the parameter, as `optimizer.state.exp_avg.<parameter>`. Every rank writes and reads the
state that it holds, in place and without communication; state that is offloaded stays in host
memory. A rank of the distributed optimizer holds a range of a parameter's elements, which is a few
boxes; the checkpoint format stores a tensor as boxes, and reads any box from those that overlap it.

Megatron's own format for its distributed optimizer is not used: saving and loading it gathers the
state of the whole model-parallel shard (12 bytes a parameter) on every data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from backends.megatron.checkpoint.shards import sharded_entries
from backends.megatron.training.optimizer import ScheduledOptimizer

# Offset and size in every dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def optimizer_tensors(
    optimizer: ScheduledOptimizer, weights: Mapping[str, Any]
) -> dict[str, ShardedTensor]:
    """The state that this rank holds, as boxes that share memory with it.

    fp32 weights are their own masters and are left out.

    Args:
        weights: the sharded state of the model, with the global offsets of its parameters.
    """
    found: dict[str, ShardedTensor] = {}
    entries = sharded_entries(weights)
    held = {id(each.parameter): each for each in _held_state(optimizer, [e.data for e in entries])}
    for entry in entries:
        if id(entry.data) not in held:
            continue
        state = held.pop(id(entry.data))
        for first, part in _parts(entry):
            for box in _boxes_of(first, part, state):
                found[f"{box.key} {box.global_offset}"] = box
    if held:
        raise RuntimeError(
            f"{len(held)} parameters of the optimizer are not in the sharded state of the model:"
            f" shapes {[tuple(each.parameter.shape) for each in held.values()]}"
        )
    return found


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Divide the elements `start` to `end` of a flattened tensor into boxes, in their order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = tuple(shape[1:])
    row = math.prod(inner)
    first_whole = -(-start // row)
    last_whole = end // row
    # The range is inside one row.
    if first_whole > last_whole:
        yield from _in_row(last_whole, inner, start - last_whole * row, end - last_whole * row)
        return
    if first_whole * row > start:
        yield from _in_row(first_whole - 1, inner, start - (first_whole - 1) * row, row)
    if last_whole > first_whole:
        yield (first_whole, *[0] * len(inner)), (last_whole - first_whole, *inner)
    if end > last_whole * row:
        yield from _in_row(last_whole, inner, 0, end - last_whole * row)


def _in_row(index: int, inner: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    for offset, size in boxes(inner, start, end):
        yield (index, *offset), (1, *size)


@dataclass(frozen=True)
class _HeldState:
    """The elements of a parameter whose state is on this rank."""

    parameter: Tensor
    start: int
    tensors: Mapping[str, Tensor]  # by kind, flat: "exp_avg", "exp_avg_sq", "param"
    is_divided: bool  # over data-parallel ranks; otherwise all of them hold the same state


def _held_state(optimizer: ScheduledOptimizer, parameters: Iterable[Any]) -> Iterator[_HeldState]:
    # A plain optimizer steps the fp32 copy of a parameter, or the parameter itself.
    stepped = {id(getattr(each, "main_param", each)): each for each in parameters}
    for part in optimizer.parts:
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_group_index_map:
                start = part._get_model_param_range_map(parameter)["param"].start
                state = part._get_main_param_and_optimizer_states(parameter)
                yield _HeldState(
                    parameter, start, _flat(optimizer, parameter, state), is_divided=True
                )
        else:
            for master in (p for group in part.param_groups for p in group["params"]):
                parameter = stepped.get(id(master), master)
                state = {"param": master, **part.optimizer.state[master]}
                flat = _flat(optimizer, parameter, state)
                yield _HeldState(parameter, 0, flat, is_divided=False)


def _flat(
    optimizer: ScheduledOptimizer, parameter: Tensor, state: Mapping[str, Any]
) -> dict[str, Tensor]:
    kinds = ["exp_avg", "exp_avg_sq"]
    if parameter.dtype != torch.float32:
        kinds.append("param")
    return {kind: optimizer.state.contents(state[kind].detach()).view(-1) for kind in kinds}


def _parts(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[int, ShardedTensor]]:
    """The tensors that a parameter is saved as, each with its offset in the parameter.

    A factory splits a parameter, for example into a gate and an up projection.
    """
    if isinstance(entry, ShardedTensor):
        yield 0, entry
        return
    for part in nested_values(entry.build()):
        data = part.data
        if not data.is_contiguous() or data.data_ptr() < entry.data.data_ptr():
            raise RuntimeError(
                f"{entry.key}: Megatron saves this parameter rearranged, and its optimizer state"
                " cannot follow; expected contiguous parts of the parameter"
            )
        yield (data.data_ptr() - entry.data.data_ptr()) // data.element_size(), part


def _boxes_of(first: int, part: ShardedTensor, state: _HeldState) -> Iterator[ShardedTensor]:
    """The held state of a part of a parameter; the part begins at element `first`."""
    count = math.prod(part.local_shape)
    for kind, tensor in state.tensors.items():
        start = max(state.start - first, 0)
        end = min(state.start + tensor.numel() - first, count)
        for offset, size in boxes(part.local_shape, start, end):
            numel = math.prod(size)
            at = start + first - state.start
            start += numel
            whole = (*[0] * part.prepend_axis_num, *offset)
            local_shape = (*[1] * part.prepend_axis_num, *size)
            yield ShardedTensor(
                key=f"optimizer.state.{kind}.{part.key}",
                data=tensor[at : at + numel].view(local_shape),
                dtype=tensor.dtype,
                local_shape=local_shape,
                global_shape=tuple(part.global_shape),
                global_offset=tuple(map(sum, zip(part.global_offset, whole, strict=True))),
                # The boxes form no regular grid.
                axis_fragmentations=None,
                replica_id=(*part.replica_id[:-1], 0) if state.is_divided else part.replica_id,
                allow_shape_mismatch=part.allow_shape_mismatch,
            )
