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


def choose_transport(
    config: EngineConfig, engines: Sequence[RolloutEngine], *, device: torch.device, host: str
) -> Transport:
    """Engines in this process take copies whatever the configuration says."""
    joining = [hasattr(engine, "join_group") for engine in engines]
    if not any(joining):
        return CopyTransport(timeout_s=config.update_timeout_s)
    if not all(joining):
        raise ConfigError(
            "rollout.engine: engines in this process and engines in others cannot serve one run: "
            + ", ".join(f"{engine.name} ({'other' if other else 'this'})" for engine, other in zip(engines, joining))
        )
    if config.transport in ("auto", "distributed"):
        return DistributedTransport(device=device, host=host, timeout_s=config.update_timeout_s)
    raise ConfigError(f"rollout.engine.transport: {config.transport} is for engines of kind sglang")
