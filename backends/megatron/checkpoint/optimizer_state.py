"""Optimizer state in a checkpoint, independent of the layout and of the kind of optimizer.

Each parameter has its moments, and below fp32 its master weights, in its own shape, as
`optimizer.state.exp_avg.<parameter>`. Megatron adds more to these names: the number of the
optimizer, since experts over several ranks get one of their own, and for each kind of optimizer
another word for the masters. And the rest of the state (groups, step counts) has the shape of the
optimizers that saved it. So only tensors are read, under any of their names; the rest of the state
is that of the loading optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)

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
