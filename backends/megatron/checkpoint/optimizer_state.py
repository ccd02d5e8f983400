"""Optimizer state in a checkpoint: tensors, under names that say nothing of the layout or of the
kind of optimizer.

Each parameter has its moments, and below fp32 its master, in its own shape, as
`optimizer.state.exp_avg.<parameter>`. Megatron has more in these names: the number of the
optimizer, since experts over several ranks get one of their own, and for each kind another word for
the masters. And what is around the tensors (groups, step counts) has the shape of the optimizers
that saved. So only tensors are read, by whatever name the checkpoint has for them; what is around
them is the loading optimizer's own.
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

# For Megatron's `sharded_state_dict`: whole tensors from the distributed optimizer, no optimizer's
# number before names.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

_MASTERS = "optimizer.state.param."  # of the distributed optimizer
_PLAIN_MASTERS = "optimizer.state.fp32_param."
# in checkpoints written without `chained_optim_avoid_prefix`
_NUMBERED = re.compile(r"^chained_\d+\.")


def tensors_as_saved(wanted: Any, saved: Iterable[str], *, fp32: bool) -> Any:
    """The tensors of `wanted`, a sharded state of the optimizer that loads, under the names that a
    checkpoint gives them.

    A tensor that the checkpoint lacks keeps its name: reading says so.

    Args:
        saved: the names of all tensors of the checkpoint.
        fp32: masters are left out, since they are the weights, which are read anyway.
    """
    names = {_plain_name(name): name for name in saved}

    def renamed(tensor: Any) -> Any:
        name = _plain_name(tensor.key)
        return (
            None
            if fp32 and name.startswith(_MASTERS)
            else replace(tensor, key=names.get(name, tensor.key))
        )

    return _tensors(wanted, renamed)


def _plain_name(name: str) -> str:
    return _NUMBERED.sub("", name).replace(_PLAIN_MASTERS, _MASTERS, 1)


def _tensors(state: Any, change: Callable[[Any], Any]) -> Any:
    """The nest of `state` with its sharded tensors alone, each changed; None where there is none."""
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        return change(state)
    if isinstance(state, list):
        state = dict(enumerate(state))
    if not isinstance(state, Mapping):
        return None
    return {
        key: found for key, value in state.items() if (found := _tensors(value, change)) is not None
    } or None


def completed(wanted: Any, loaded: Any, *, taken: int, counts_in_groups: bool) -> Any:
    """`wanted` with the `loaded` tensors in their places and `taken` as the number of steps, as
    `load_state_dict` takes it.

    Args:
        counts_in_groups: see `ScheduledOptimizer`.
    """
    inner = partial(completed, taken=taken, counts_in_groups=counts_in_groups)
    if isinstance(wanted, ShardedTensor | ShardedTensorFactory):
        return loaded
    if isinstance(wanted, LocalNonpersistentObject):
        return wanted.unwrap()
    inside = loaded if isinstance(loaded, Mapping) else {}
    if isinstance(wanted, list):
        return [inner(value, inside.get(place)) for place, value in enumerate(wanted)]
    if not isinstance(wanted, Mapping):
        return wanted
    whole = {key: inner(value, inside.get(key)) for key, value in wanted.items()}
    # inside the plain kind
    if "param_groups" in whole and "state" in whole and not counts_in_groups:
        whole["state"]["common_step"] = torch.tensor(float(taken))
    # Megatron's distributed optimizer takes it from here in any case
    elif "param_groups" in whole:
        for group in whole["param_groups"]:
            group["step"] = taken
    # of one parameter: its masters may be the weights
    elif "exp_avg" in whole:
        whole = {key: value for key, value in whole.items() if value is not None}
    return whole
