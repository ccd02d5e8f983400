"""Chooses the transport of a run: `rollout.engine.transport`, or the best for its engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlcore.config import Config
from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import ConfigError
from rlcore.interfaces import RolloutEngine
from rollout.weight_sync.base import CopyTransport, Transport
from rollout.weight_sync.delta import DeltaTransport
from rollout.weight_sync.folders import DiskTransport, WeightFolders
from rollout.weight_sync.links import DistributedTransport
from rollout.weight_sync.serialized import TensorTransport


def choose_transport(
    config: Config, engines: Sequence[RolloutEngine], *, device: torch.device
) -> Transport:
    """Make the transport. Raises ConfigError if the engines do not all take it."""
    limit = config.rollout.engine.update_timeout_s
    probe = config.rollout.engine.health_timeout_s
    name = choose_name(config.rollout.engine, [engine.transports for engine in engines])
    if name == "copy":
        return CopyTransport(timeout_s=limit)
    if name == "distributed":
        return DistributedTransport(
            device=device,
            timeout_s=limit,
            probe_s=probe,
            senders=config.rollout.engine.senders,
            rails=config.rollout.engine.rails,
        )
    if name == "tensor":
        return TensorTransport(timeout_s=limit)
    tokenizer = config.model.tokenizer
    folders = WeightFolders(
        shared_folder(config),
        model=Path(config.model.path),
        tokenizer=None if tokenizer is None else Path(tokenizer),
    )
    by_folder = DeltaTransport if name == "delta" else DiskTransport
    return by_folder(folders, timeout_s=limit)


def shared_folder(config: Config) -> Path:
    """The folder for weights that trainer and engines share."""
    given = config.rollout.engine.weights_dir
    return Path(given) if given is not None else Path(config.run.dir) / config.run.name / "weights"


def choose_name(config: EngineConfig, offered: Sequence[Sequence[str]]) -> str:
    """Choose the name of a transport that all engines take.

    `auto` stands for the first common one in the first engine's order. If trainer and engines share
    GPUs, it stands for `tensor`, which goes from memory to memory.

    Args:
        offered: the transports of each engine, the preferred one first.
    """
    common = [name for name in offered[0] if all(name in others for others in offered)]
    if not common:
        raise ConfigError(
            "rollout.engine: no transport reaches all engines of this run; they take"
            f" {list(map(list, offered))}"
        )
    if config.transport == "auto" or common == ["copy"]:
        return "tensor" if config.colocated and "tensor" in common else common[0]
    if config.transport not in common:
        raise ConfigError(
            f"rollout.engine.transport: {config.transport} does not reach this run's engines; they"
            f" take {', '.join(common)}"
        )
    return config.transport
