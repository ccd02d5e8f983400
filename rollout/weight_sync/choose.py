"""Chooses the transport of a run: `rollout.engine.transport`, or the best for its engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rlcore.config import Config
from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import ConfigError
from rlcore.interfaces import BucketSender, RolloutEngine
from rollout.weight_sync.adapter import AdapterSender, AdapterTransport
from rollout.weight_sync.base import CopySender, CopyTransport, Transport
from rollout.weight_sync.delta import DeltaSender, DeltaTransport
from rollout.weight_sync.disk import DiskTransport, FolderSender, WeightFolders
from rollout.weight_sync.distributed import DistributedTransport
from rollout.weight_sync.sender import GroupSender
from rollout.weight_sync.tensor import SerializedSender, TensorTransport


def choose_transport(
    config: Config, engines: Sequence[RolloutEngine], *, adapters: bool = False
) -> Transport:
    """Make the engines' half of the transport. Raises ConfigError if an engine lacks it.

    Args:
        adapters: what is sent are adapters, for which an engine may have `adapter_transports`.
    """
    engine = config.rollout.engine
    limit = engine.update_timeout_s
    offered = [engine.transports for engine in engines]
    if adapters:
        offered = [getattr(one, "adapter_transports", one.transports) for one in engines]
    name = choose_name(engine, offered)
    makers: dict[str, Callable[[], Transport]] = {
        "copy": lambda: CopyTransport(timeout_s=limit),
        "adapter": lambda: AdapterTransport(timeout_s=limit),
        "distributed": lambda: DistributedTransport(
            timeout_s=limit,
            probe_s=engine.health_timeout_s,
            senders=engine.senders,
            rails=engine.rails,
        ),
        "tensor": lambda: TensorTransport(timeout_s=limit),
        "disk": lambda: DiskTransport(shared_folder(config), timeout_s=limit),
        "delta": lambda: DeltaTransport(shared_folder(config), timeout_s=limit),
    }
    return makers[name]()


def make_sender(name: str, config: Config, device: torch.device) -> BucketSender:
    """Make the trainer's half of a transport, for a rank on `device`."""

    def folders() -> WeightFolders:
        tokenizer = config.model.tokenizer
        return WeightFolders(
            shared_folder(config),
            model=Path(config.model.path),
            tokenizer=None if tokenizer is None else Path(tokenizer),
        )

    makers: dict[str, Callable[[], BucketSender]] = {
        "copy": CopySender,
        "adapter": AdapterSender,
        "distributed": lambda: GroupSender(device, config.rollout.engine.update_timeout_s),
        "tensor": SerializedSender,
        "disk": lambda: FolderSender(folders()),
        "delta": lambda: DeltaSender(folders()),
    }
    return makers[name]()


def shared_folder(config: Config) -> Path:
    """The folder for weights that trainer and engines share."""
    given = config.rollout.engine.weights_dir
    return Path(given) if given is not None else Path(config.run.dir) / config.run.name / "weights"


def choose_name(config: EngineConfig, offered: Sequence[Sequence[str]]) -> str:
    """Choose the name of a transport that all engines take.

    `auto` stands for the first common transport in the first engine's order. If trainer and engines
    share GPUs, `auto` stands for `tensor`, which copies from memory to memory.

    Args:
        offered: the transports of each engine, the preferred one first.
    """
    common = [name for name in offered[0] if all(name in others for others in offered)]
    if not common:
        raise ConfigError(
            "rollout.engine: no transport reaches all engines of this run; they take"
            f" {list(map(list, offered))}"
        )
    if config.transport == "auto" or common in (["copy"], ["adapter"]):
        return "tensor" if config.colocated and "tensor" in common else common[0]
    if config.transport not in common:
        raise ConfigError(
            f"rollout.engine.transport: {config.transport} does not reach this run's engines; they"
            f" take {', '.join(common)}"
        )
    return config.transport
