"""Optimizer state saved by the plain optimizer and loaded into the distributed one, or the other way round.

Both kinds save each parameter's moments in the parameter's own shape, as `optimizer.state.exp_avg.<parameter>`. What differs is
the name of the fp32 masters (in fp32 the weights are the masters) and everything around the tensors. So only tensors are read;
what is around them is the loading optimizer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

_MASTERS = {False: "optimizer.state.fp32_param.", True: "optimizer.state.param."}       # by "is distributed"


def tensors_of_other_kind(wanted: Any, *, distributed: bool, fp32: bool) -> Any:
    """The tensors of `wanted`, a sharded state of the optimizer that loads, under the names that the other kind gives them.

    `distributed`: the kind that loads. `fp32`: masters are left out, since the weights are read anyway.
    """
    mine, theirs = _MASTERS[distributed], _MASTERS[not distributed]

    def renamed(tensor: Any) -> Any:
        return None if fp32 and mine in tensor.key else replace(tensor, key=tensor.key.replace(mine, theirs))

    return _tensors(wanted, renamed)


def _tensors(state: Any, change: Callable[[Any], Any]) -> Any:
    """The nest of `state` with its sharded tensors alone, each changed; None where there is none."""
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        return change(state)
    if isinstance(state, list):
        state = dict(enumerate(state))
    if not isinstance(state, Mapping):
        return None
    return {key: found for key, value in state.items() if (found := _tensors(value, change)) is not None} or None


def completed(wanted: Any, loaded: Any, *, taken: int) -> Any:
    """`wanted` with the `loaded` tensors in their places and `taken` as the number of steps, as `load_state_dict` takes it."""
    if isinstance(wanted, ShardedTensor | ShardedTensorFactory):
        return loaded
    if isinstance(wanted, LocalNonpersistentObject):
        return wanted.unwrap()
    inside = loaded if isinstance(loaded, Mapping) else {}
    if isinstance(wanted, list):
        return [completed(value, inside.get(place), taken=taken) for place, value in enumerate(wanted)]
    if not isinstance(wanted, Mapping):
        return wanted
    whole = {key: completed(value, inside.get(key), taken=taken) for key, value in wanted.items()}
    if "param_groups" in whole and "state" in whole:        # torch's optimizer, inside the plain kind
        whole["state"]["common_step"] = torch.tensor(float(taken))
    elif "param_groups" in whole:                           # ... and inside the distributed one
        for group in whole["param_groups"]:
            group["step"] = taken
    elif "exp_avg" in whole:                                # of one parameter: its masters may be the weights
        whole = {key: value for key, value in whole.items() if value is not None}
    return whole
