"""Optimizer state in a checkpoint, independent of the layout and of the kind of optimizer.

Each parameter has its moments, and below fp32 its master weights, in its own shape, as
`optimizer.state.exp_avg.<parameter>`. Megatron adds more to these names: the number of the
optimizer, since experts over several ranks get one of their own, and for each kind of optimizer
another word for the masters. And the rest of the state (groups, step counts) has the shape of the
optimizers that saved it. So only tensors are read, under any of their names; the rest of the state
is that of the loading optimizer.

megatron-core 0.16.1 returns a wrong state of its distributed optimizer, which `fixed_state` mends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from backends.megatron.training.optimizer import ScheduledOptimizer

# For Megatron's `sharded_state_dict`: the distributed optimizer gives whole tensors, and names have
# no optimizer's number.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

_MASTERS = "optimizer.state.param."  # of the distributed optimizer
_PLAIN_MASTERS = "optimizer.state.fp32_param."
# in checkpoints written without `chained_optim_avoid_prefix`
_NUMBERED = re.compile(r"^chained_\d+\.")


def tensors_as_saved(wanted: Any, saved: Iterable[str], *, fp32: bool) -> Any:
    """Rename the tensors of `wanted` to the names that the checkpoint has for them.

    A tensor that the checkpoint lacks keeps its name: reading then reports it.

    Args:
        wanted: the sharded state of the optimizer that loads.
        saved: the names of all tensors of the checkpoint.
        fp32: leave the masters out, since they are the weights, which are read anyway.
    """
    names = {_plain_name(name): name for name in saved}

    def renamed(tensor: Any) -> Any:
        name = _plain_name(tensor.key)
        if fp32 and name.startswith(_MASTERS):
            return None
        return replace(tensor, key=names.get(name, tensor.key))

    return _tensors(wanted, renamed)


def _plain_name(name: str) -> str:
    return _NUMBERED.sub("", name).replace(_PLAIN_MASTERS, _MASTERS, 1)


def _tensors(state: Any, change: Callable[[Any], Any]) -> Any:
    """The nest of `state` reduced to its sharded tensors, each changed; None if it has none."""
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        return change(state)
    if isinstance(state, list):
        state = dict(enumerate(state))
    if not isinstance(state, Mapping):
        return None
    return {
        key: found for key, value in state.items() if (found := _tensors(value, change)) is not None
    } or None


def completed(wanted: Any, loaded: Any, *, steps_taken: int, counts_in_groups: bool) -> Any:
    """Fill `wanted` with the `loaded` tensors and the number of steps, for `load_state_dict`.

    Args:
        counts_in_groups: see `ScheduledOptimizer`.
    """
    inner = partial(completed, steps_taken=steps_taken, counts_in_groups=counts_in_groups)
    if isinstance(wanted, ShardedTensor | ShardedTensorFactory):
        return loaded
    if isinstance(wanted, LocalNonpersistentObject):
        return wanted.unwrap()
    inside = loaded if isinstance(loaded, Mapping) else {}
    if isinstance(wanted, list):
        return [inner(value, inside.get(index)) for index, value in enumerate(wanted)]
    if not isinstance(wanted, Mapping):
        return wanted
    whole = {key: inner(value, inside.get(key)) for key, value in wanted.items()}
    # the state of a plain optimizer
    if "param_groups" in whole and "state" in whole and not counts_in_groups:
        whole["state"]["common_step"] = torch.tensor(float(steps_taken))
    # Megatron's distributed optimizer always takes the number of steps from its groups
    elif "param_groups" in whole:
        for group in whole["param_groups"]:
            group["step"] = steps_taken
    # the state of one parameter, whose masters may be the weights
    elif "exp_avg" in whole:
        whole = {key: value for key, value in whole.items() if value is not None}
    return whole


# --- corrections of Megatron ----------------------------------------------------------------------


@contextmanager
def fixed_state(optimizer: ScheduledOptimizer) -> Iterator[None]:
    """Inside, `sharded_state_dict` of the distributed optimizer works and is right on every rank.

    - Megatron gathers without the padding between buckets but slices by offsets that count it.
      Every parameter behind the first padded bucket would be saved shifted or as zeros, for example
      with tied embeddings over pipeline stages.
    - Megatron fails where a rank has no parameter, for example the experts' optimizer on a pipeline
      stage of dense layers.
    """
    parts: list[Any] = [part for part in optimizer.parts if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part.get_parameter_state_dp_zero = _with_padding(part)
        if not part.optimizer.state:
            part.state_dict = _without_parameters(part, float(optimizer.steps_taken))
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero
            part.__dict__.pop("state_dict", None)


def _with_padding(part: Any) -> Callable[..., Any]:
    gather = part.get_parameter_state_dp_zero

    def gather_padded(**options: Any) -> Any:
        state = gather(**options)
        for index, buffer in enumerate(part.buffers):
            for tensors in state[index].values() if state is not None else ():
                tensors.update(
                    {
                        k: _pad_buckets(buffer, v)
                        for k, v in tensors.items()
                        if isinstance(v, Tensor)
                    }
                )
        return state

    return gather_padded


def _pad_buckets(buffer: Any, dense: Tensor) -> Tensor:
    """Move the buckets of a gradient buffer from `dense`, without gaps, to their own offsets."""
    padded = dense.new_zeros(buffer.numel)
    at = 0
    for bucket in buffer.buckets:
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = dense[
            at : at + bucket.numel_unpadded
        ]
        at += bucket.numel_unpadded
    return padded


def _without_parameters(part: Any, step: float) -> Callable[[], dict[str, Any]]:
    """Replace `state_dict`, which takes the step count from a parameter, where there is none."""

    def state_dict() -> dict[str, Any]:
        whole = part.optimizer.state_dict()
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "step": step}
            for group in whole["param_groups"]
        ]
        return {"optimizer": {"param_groups": groups}}

    return state_dict
