"""Fixes of megatron-core 0.16.1: it returns a wrong state of its distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from backends.megatron.training.optimizer import ScheduledOptimizer


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
