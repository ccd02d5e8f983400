"""Which transport carries the weights of a run: `rollout.engine.transport`, or what suits the engines at hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcore.config.rollout import EngineConfig
from rlcore.errors import ConfigError
from rlcore.protocols import RolloutEngine
from rollout.transports.base import Transport
from rollout.transports.copy import CopyTransport
from rollout.transports.distributed import DistributedTransport
from rollout.transports.tensor import TensorTransport


def choose_transport(
    config: EngineConfig, engines: Sequence[RolloutEngine], *, device: torch.device, host: str
) -> Transport:
    """Raises ConfigError where the engines have no common way, or not the one that is configured."""
    name = choose_name(config, [engine.transports for engine in engines])
    if name == "copy":
        return CopyTransport(timeout_s=config.update_timeout_s)
    if name == "distributed":
        return DistributedTransport(device=device, host=host, timeout_s=config.update_timeout_s)
    return TensorTransport(timeout_s=config.update_timeout_s)


def choose_name(config: EngineConfig, offered: Sequence[Sequence[str]]) -> str:
    """`auto`: the first way of the first engine that all have; where trainer and engines share GPUs, from memory to memory.

    Args:
        offered: each engine's ways, the preferred one first.
    """
    common = [name for name in offered[0] if all(name in others for others in offered)]
    if not common:
        raise ConfigError(f"rollout.engine: no transport reaches all engines of this run; they take {list(map(list, offered))}")
    if config.transport == "auto" or common == ["copy"]:
        return "tensor" if config.colocated and "tensor" in common else common[0]
    if config.transport not in common:
        raise ConfigError(
            f"rollout.engine.transport: {config.transport} does not reach the engines of this run; they take {', '.join(common)}"
        )
    return config.transport
