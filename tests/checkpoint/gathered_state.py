"""Writes optimizer state as checkpoints of 0.1.0 hold it: Megatron's own, gathered and whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from backends.megatron.checkpoint import save_load
    from backends.megatron.training.optimizer import ScheduledOptimizer


@contextmanager
def gathered_states(*, numbered: bool) -> Iterator[None]:
    """Inside, `save_checkpoint` writes state in the old way.

    Args:
        numbered: names have the number of the optimizer, as those without
            `chained_optim_avoid_prefix`.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": not numbered,
    }

    def gathered(optimizer: ScheduledOptimizer, weights: Mapping[str, Any]) -> Any:
        with _fixed_state(optimizer):
            return optimizer.megatron.sharded_state_dict(dict(weights), metadata=metadata)

    present = save_load.optimizer_tensors
    save_load.optimizer_tensors = gathered
    try:
        yield
    finally:
        save_load.optimizer_tensors = present


@contextmanager
def _fixed_state(optimizer: ScheduledOptimizer) -> Iterator[None]:
    """Inside, `sharded_state_dict` of the distributed optimizer works and is right on every rank.

    megatron-core 0.16.1 gathers without the padding between buckets but slices by offsets that
    count it, and fails where a rank has no parameter.
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
            for tensors in state[index].values():
                for key, value in tensors.items():
                    if isinstance(value, Tensor):
                        tensors[key] = _pad_buckets(buffer, value)
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
