"""The engines of a run, and their GPUs on this machine: the trainer's if colocated, or free ones.

GPUs are numbered as the trainer's processes see them, 0 to the last of `CUDA_VISIBLE_DEVICES`; rank
k of a machine is on GPU k.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlcore.config import Config
from rlcore.config.derived import hosted_engines
from rlcore.config.engine_registry import KINDS
from rlcore.config.sections.rollout import EngineConfig
from rlcore.deadlines import CLOSE_ENGINES_S, KILL_ENGINE_S
from rlcore.errors import ConfigError, RunFailed
from rlcore.interfaces import RolloutEngine
from rlcore.launch.environment import is_rank
from rlcore.launch.logs import log_folder
from rollout.asyncio_utils import LoopThread
from rollout.engines.factories import EngineNode, EngineSite, factory_of
from rollout.fleet.engine_list import EngineList

if TYPE_CHECKING:
    from rollout.fleet.engine_memory import FleetMemory
    from rollout.service import RolloutService


def build_service(config: Config, *, greedy_baseline: bool) -> tuple[RolloutService, FleetMemory]:
    """Make the rollout service and its `EngineMemory` in this process, without starting them.

    Raises:
        UserError: see `build_engines`, `load_prompts` and `RolloutService`.
    """
    from rlcore.data.loading import load_prompts
    from rlcore.data.tokenizer import load_tokenizer
    from rollout.fleet.engine_memory import FleetMemory
    from rollout.service import RolloutService

    engines = build_engines(config)
    thread = LoopThread("rollout")
    try:
        thread.call(_warm_up(engines), KILL_ENGINE_S, "starting the engines' processes")
        tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        prompts = load_prompts(config, tokenizer)
        service = RolloutService(
            config, tokenizer, engines, prompts, greedy_baseline=greedy_baseline, thread=thread
        )
    except BaseException:
        thread.call(_close(engines), CLOSE_ENGINES_S, "closing the engines")
        thread.close()
        raise
    return service, FleetMemory(service.fleet, config.rollout.engine, service.thread)


async def _warm_up(engines: Sequence[RolloutEngine]) -> None:
    """Let engines with a process of their own import while the run reads its input."""
    for engine in engines:
        warm_up = getattr(engine, "warm_up", None)
        # recovery: the start of the engine tries again, and says why
        with suppress(RunFailed):
            if warm_up is not None:
                await warm_up()


async def _close(engines: Sequence[RolloutEngine]) -> None:
    """Close all engines; the error that ends the service is another one."""
    await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)


def build_engines(config: Config) -> list[RolloutEngine]:
    """Build the engines of a run, without starting them; see the factory of their kind.

    Raises:
        ConfigError: an environment, a GPU or an argument that the configuration needs is missing.
    """
    if config.cluster.launcher == "ray" and hosted_engines(config):
        from rlcore.launch.ray.engine_hosts import cluster_engines

        return cluster_engines(config)
    if config.rollout.engine.urls_file is not None:
        return EngineList(config).build_all()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if is_rank() else 1
    site = engine_site(config, local_ranks=local_ranks, logs=log_folder(config.run))
    return list(factory_of(config.rollout.engine.kind).build(site))


def engine_site(
    config: Config, *, local_ranks: int, logs: Path, node: EngineNode | None = None
) -> EngineSite:
    """Describe this machine to engines that share it with `local_ranks` trainer processes.

    Args:
        node: this machine's part of an engine on several machines.
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
    """Return each engine's GPUs, one per tensor-parallel rank; () for engines on the CPU.

    Engines that can share a GPU (`EngineKind.shares_gpu`) are spread over the GPUs without a
    trainer, or over all GPUs if each has a trainer.

    Args:
        visible: the number of GPUs of this machine; 0 on a CPU.
        ranks: the number of trainer processes on it.
        nodes: machines over which an engine's ranks are spread.

    Raises:
        ConfigError: there are too few GPUs, or `rollout.engine.gpus` names GPUs that do not exist
            or that an engine cannot use.
    """
    if not visible or config.device == "cpu":
        why = "torch sees no GPU here"
        if config.device == "cpu":
            why = "engines are on the CPU (rollout.engine.device)"
        if config.gpus:
            raise ConfigError(f"rollout.engine.gpus: got {config.gpus}, but {why}: leave it out")
        return [()] * config.count
    trainer = range(min(ranks, visible))
    free = trainer if config.colocated else range(len(trainer), visible)
    if (kind := KINDS.get(config.kind)) is not None and kind.shares_gpu:
        pool = free or range(visible)
        return [(pool[index % len(pool)],) for index in range(config.count)]
    width = config.tensor_parallel // nodes
    offered = list(config.gpus or free)
    if missing := [gpu for gpu in offered if gpu >= visible]:
        raise ConfigError(
            f"rollout.engine.gpus: got {missing[0]}, but this machine has GPUs 0 to {visible - 1}"
        )
    if config.colocated and (alone := [gpu for gpu in offered if gpu not in trainer]):
        span = f"they are on {trainer[0]} to {trainer[-1]}"
        if len(trainer) == 1:
            span = f"it is on {trainer[0]}"
        raise ConfigError(
            f"rollout.engine.gpus: got {alone[0]}, which no trainer process is on ({span}): with"
            " rollout.engine.colocated engines take turns with the trainer; leave gpus out"
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
    why = f"of the {visible} of this machine the trainer has {trainer}"
    advice = (
        ", or fewer trainer processes (cluster.processes_per_node), share GPUs by"
        " rollout.engine.colocated, or name engines elsewhere in rollout.engine.urls"
    )
    if config.colocated:
        why = f"the trainer, whose GPUs they share, has {trainer} on this machine"
        advice = ", or on several nodes cluster.launcher: ray, which starts engines on each"
    return f"rollout.engine.count: {wanted} GPUs, but {why}: use fewer or smaller engines{advice}"


def visible_names(gpus: Sequence[int], environment: Mapping[str, str]) -> list[str]:
    """Name GPUs for a child's `CUDA_VISIBLE_DEVICES`; this process may see only a part itself."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if not chosen:
        return [str(gpu) for gpu in gpus]
    names = [name.strip() for name in chosen.split(",")]
    return [names[gpu] for gpu in gpus]
