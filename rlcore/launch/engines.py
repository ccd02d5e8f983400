"""The engines of a run, and their GPUs on this machine: the trainer's own if colocated, else free.

GPUs are numbered as the trainer's processes see them, 0 to the last of `CUDA_VISIBLE_DEVICES`; rank
k of a machine is on GPU k.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlcore.config import Config
from rlcore.config.derived import hosted_engines
from rlcore.config.engine_registry import KINDS
from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import ConfigError
from rlcore.interfaces import RolloutEngine
from rlcore.launch.environment import is_rank
from rlcore.launch.logs import log_folder
from rollout.engines.factories import EngineNode, EngineSite, factory_of
from rollout.fleet.engine_list import EngineList

IN_PROCESS = "copy"  # the transport that hands tensors over inside one process


def build_engines(config: Config) -> list[RolloutEngine]:
    """Build the engines of a run, without starting them; see the factory of their kind.

    Raises:
        ConfigError: the configuration asks in vain for an environment, a GPU or an argument.
    """
    if config.cluster.launcher == "ray" and hosted_engines(config):
        from rlcore.launch.ray.engine_hosts import cluster_engines

        return cluster_engines(config)
    if config.rollout.engine.urls_file is not None:
        return EngineList(config).build_all()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if is_rank() else 1
    site = engine_site(
        config,
        local_ranks=local_ranks,
        logs=log_folder(config.run),
    )
    return list(factory_of(config.rollout.engine.kind).build(site))


def check_reachable(engines: Sequence[RolloutEngine], config: Config) -> None:
    """Raise ConfigError for an engine that takes weights from the trainer's own process alone."""
    for engine in engines:
        if engine.transports == (IN_PROCESS,):
            raise ConfigError(
                f"rollout.engine.kind: {config.rollout.engine.kind} takes weights in its own"
                " process alone, and with rollout.service: process the trainer is in another one:"
                " set rollout.service to in_process"
            )


def engine_site(
    config: Config,
    *,
    local_ranks: int,
    logs: Path,
    node: EngineNode | None = None,
) -> EngineSite:
    """This machine, for engines that are beside `local_ranks` processes of the trainer.

    Args:
        node: this machine's part, where an engine is on several.
    """

    def gpus() -> list[list[str]]:
        assigned = assign_gpus(
            config.rollout.engine,
            visible=torch.cuda.device_count(),
            ranks=local_ranks,
            nodes=1 if node is None else node.nodes,
        )
        return [visible_names(numbers, os.environ) for numbers in assigned]

    return EngineSite(config, local_ranks, logs, gpus, node)


def assign_gpus(
    config: EngineConfig, *, visible: int, ranks: int, nodes: int = 1
) -> list[tuple[int, ...]]:
    """Return each engine's GPUs, one for each tensor-parallel rank; () for engines on the CPU.

    Engines that can share a GPU (`EngineKind.shares_gpu`) are dealt over those that no trainer is
    on; if there is none, over all.

    Args:
        visible: the number of GPUs of this machine; 0 on a CPU.
        ranks: the number of trainer processes on it.
        nodes: machines over which an engine's ranks are dealt.

    Raises:
        ConfigError: there are too few GPUs, or `rollout.engine.gpus` names some that do not exist
            or that an engine cannot have.
    """
    if not visible or config.device == "cpu":
        if config.gpus:
            where = (
                "engines are on the CPU (rollout.engine.device)"
                if config.device == "cpu"
                else "torch sees no GPU here"
            )
            raise ConfigError(f"rollout.engine.gpus: got {config.gpus}, but {where}: leave it out")
        return [()] * config.count
    trainer = range(min(ranks, visible))
    if (kind := KINDS.get(config.kind)) is not None and kind.shares_gpu:
        free = trainer if config.colocated else range(len(trainer), visible)
        pool = free or range(visible)
        return [(pool[index % len(pool)],) for index in range(config.count)]
    width = config.tensor_parallel // nodes
    offered = list(config.gpus or (trainer if config.colocated else range(len(trainer), visible)))
    if missing := [gpu for gpu in offered if gpu >= visible]:
        raise ConfigError(
            f"rollout.engine.gpus: got {missing[0]}, but this machine has GPUs 0 to {visible - 1}"
        )
    if config.colocated and (alone := [gpu for gpu in offered if gpu not in trainer]):
        raise ConfigError(
            f"rollout.engine.gpus: got {alone[0]}, which no trainer process is on"
            f" ({_span(trainer)}): with rollout.engine.colocated engines take turns with the"
            " trainer; leave gpus out"
        )
    if len(offered) < config.count * width:
        raise ConfigError(_too_few(config, width, offered, visible, len(trainer)))
    return [tuple(offered[index * width : (index + 1) * width]) for index in range(config.count)]


def _too_few(
    config: EngineConfig, width: int, offered: Sequence[int], visible: int, trainer: int
) -> str:
    ranks = f"rollout.engine.tensor_parallel {config.tensor_parallel}"
    if width < config.tensor_parallel:
        ranks += f" over {config.tensor_parallel // width} machines"
    wanted = f"{config.count} x {ranks} need {config.count * width}"
    if config.gpus:
        return f"rollout.engine.gpus: got {len(offered)}, but rollout.engine.count {wanted}"
    message = f"rollout.engine.count: {wanted} GPUs, but "
    if config.colocated:
        return (
            message
            + f"the trainer, whose GPUs they share, has {trainer} on this machine: use fewer or"
            " smaller engines"
        )
    return (
        message
        + f"of the {visible} of this machine the trainer has {trainer}: use fewer or smaller"
        " engines, or fewer trainer processes (cluster.processes_per_node), share GPUs by"
        " rollout.engine.colocated, or name engines elsewhere in rollout.engine.urls"
    )


def _span(trainer: range) -> str:
    return (
        f"it is on {trainer[0]}"
        if len(trainer) == 1
        else f"they are on {trainer[0]} to {trainer[-1]}"
    )


def visible_names(gpus: Sequence[int], environment: Mapping[str, str]) -> list[str]:
    """Name GPUs for a child's `CUDA_VISIBLE_DEVICES`; this process may see only some itself."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if not chosen:
        return [str(gpu) for gpu in gpus]
    names = [name.strip() for name in chosen.split(",")]
    return [names[gpu] for gpu in gpus]
