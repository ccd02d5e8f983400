"""The composition root: builds the parts of one rank from a configuration, for every launcher.

Only this folder and the command line may name a backend or an engine in `rlcore`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlcore.algorithms import AlgorithmError
from rlcore.config import Config
from rlcore.config.derived import (
    all_engines_timeout_s,
    generates,
    placement_timeout_s,
    publication_call_s,
    recorded_fields,
    restart_timeout_s,
)
from rlcore.config.load import Loaded
from rlcore.data.loading import prompt_warnings
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ConfigError
from rlcore.interfaces import EngineMemory, PolicyBackend, RankAddress, RolloutSource
from rlcore.launch.engines import build_service, visible_names
from rlcore.launch.process import Process, choose_threads
from rlcore.launch.run_folder import OpenRun, find_checkpoint
from rlcore.launch.service.client import RemoteMemory, ServiceClient
from rlcore.planning.devices import peak_flops
from rlcore.runs.versions import VersionJournal
from rlcore.timeline.start import START
from rlcore.tracking import build_trackers
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.gpu_sharing import GpuSharing
from rlcore.trainer.held_out import HeldOutRows
from rlcore.trainer.objective import Objective
from rlcore.trainer.rank0 import RankZero
from rlcore.trainer.rank_sync import on_rank0
from rlcore.trainer.sender_ranks import PublicationCalls, SenderRanks
from rlcore.trainer.step_metrics import Utilization
from rlcore.trainer.weight_publisher import WeightPublisher
from rlcore.weights import DTYPES
from rollout.weight_sync.process_group import gpu_identity, name_gpus, node_identity


class RolloutHandles(NamedTuple):
    """Rank 0's source of samples and receiver of weights; other ranks have none."""

    source: RolloutSource
    # Starts a call of `WeightPublication`; None if nothing generates.
    publication: Callable[..., Future[Any]] | None
    num_prompts: int
    prompt_lengths: NDArray[np.int64] | None = None
    memory: EngineMemory | None = None
    held_out: HeldOutRows | None = None


def build_algorithm(config: Config) -> tuple[Objective, CreditAssignment]:
    """Make the loss and the credit assignment. Raises ConfigError for wrong keywords."""
    try:
        objective = Objective(config.algorithm)
        return objective, CreditAssignment(config, objective)
    except AlgorithmError as error:
        raise ConfigError(f"algorithm: {error}") from error


def build_backend(
    config: Config,
    process: Process,
    objective: Objective,
    credit: CreditAssignment | None,
    *,
    optimizer_steps: int,
) -> PolicyBackend:
    """Make the Megatron backend; without `credit` it has only the policy."""
    from backends.megatron.backend import MegatronBackend

    return MegatronBackend(
        config,
        objective,
        with_reference=credit is not None and credit.passes.reference,
        with_critic=credit is not None and credit.passes.critic,
        with_teacher=credit is not None and credit.passes.teacher,
        total_steps=optimizer_steps,
        device=process.device,
    )


def export_policy(config: Config, shards: Path, folder: Path, *, merged: bool = False) -> None:
    """Write the policy in `shards` as a Hugging Face folder, as the run's backend would.

    Args:
        merged: a whole model, where the run trained adapters.
    """
    from backends.megatron.cpu.shim import importing_megatron

    with importing_megatron():
        from backends.megatron.checkpoint.to_hf import checkpoint_to_hf
        from backends.megatron.convert.read import read_architecture

    model = config.model
    checkpoint_to_hf(
        shards,
        folder,
        read_architecture(model.path),
        dtype=DTYPES[model.dtype],
        tokenizer=None if model.tokenizer is None else Path(model.tokenizer),
        lora=config.policy.lora,
        merged=merged,
    )


def open_handles(
    config: Config,
    stack: ExitStack,
    *,
    greedy_baseline: bool = False,
    service: ServiceClient | None = None,
) -> RolloutHandles:
    """Read the prompts and make the source of samples: SFT file, replay or rollout service.

    This starts nothing. `stack` closes the service.

    Args:
        service: the process of the rollout service; None: the service runs in this process.
    """
    if service is not None:
        stack.callback(service.close)
        # The service's process imports too meanwhile.
        import backends.megatron.backend  # noqa: F401

        lengths = service.open(config, greedy_baseline=greedy_baseline)
        memory = RemoteMemory(service)
        return RolloutHandles(service, service.begin_publication, len(lengths), lengths, memory)
    tokenizer = config.model.tokenizer or config.model.path
    if config.learns_from_rows:
        from rlcore.trainer.sources import RowSource

        source = RowSource(config, load_tokenizer(tokenizer))
        return RolloutHandles(
            source,
            None,
            len(source.rows),
            source.rows.prompts.lengths,
            held_out=HeldOutRows(source.held_out, config.training.batch_size),
        )
    if config.training.replay is not None:
        from rlcore.trainer.sources import ReplaySource
        from rollout.engines.checks import check_vocabulary

        replay = ReplaySource(
            Path(config.training.replay),
            vocab_size=check_vocabulary(config.model.path, load_tokenizer(tokenizer)),
            greedy_baseline=greedy_baseline,
            recorded=recorded_fields(config),
        )
        return RolloutHandles(replay, None, 1)
    here, fleet_memory = build_service(config, greedy_baseline=greedy_baseline)
    stack.callback(here.close)

    def begin(method: str, *arguments: Any) -> Future[Any]:
        work = getattr(here.publication, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(work, here.loop)

    return RolloutHandles(here, begin, len(here.prompts), here.prompts.lengths, fleet_memory)


def start_engines(process: Process, config: Config, handles: RolloutHandles | None) -> None:
    """Let rank 0 start the engines, then choose this rank's number of threads. Collective."""
    # A large model takes long to load.
    limit_s = config.cluster.start_timeout_s + restart_timeout_s(
        config.rollout.engine, placement_timeout_s(config)
    )
    with START.phase("engines"):
        process.sync.run_on_rank0(
            "starting the engines", lambda: on_rank0(handles).source.start(), timeout_s=limit_s
        )
        choose_threads(config)


def build_weight_publisher(
    config: Config,
    process: Process,
    backend: PolicyBackend,
    handles: RolloutHandles | None,
    journal: VersionJournal | None,
    stack: ExitStack,
) -> WeightPublisher | None:
    """Make the publisher of weights to the engines; None if nothing generates.

    Args:
        stack: closes this rank's connections to engines.
    """
    if not generates(config):
        return None
    from rollout.weight_sync.choose import make_sender

    device = process.device
    address = RankAddress(node_identity())
    if device.type == "cuda":
        [name] = name_gpus(visible_names([device.index], os.environ))
        address = RankAddress(address.host, gpu_identity(device), name)
    calls = None
    if handles is not None and handles.publication is not None:
        calls = PublicationCalls(handles.publication, publication_call_s(config))
    ranks = SenderRanks(
        process.sync,
        make=lambda transport: make_sender(transport, config, device),
        address=address,
        calls=calls,
    )
    stack.callback(ranks.close)
    timeout_s = all_engines_timeout_s(config)
    publisher = WeightPublisher(backend, process.sync, ranks, journal=journal, timeout_s=timeout_s)
    if handles is not None:
        publisher.published = handles.source.published
    return publisher


def build_gpu_sharing(
    config: Config, process: Process, backend: PolicyBackend, handles: RolloutHandles | None
) -> GpuSharing | None:
    """Offload a trainer that shares its GPUs with engines; call this before the engines start.

    Returns None if the engines have their own GPUs.
    """
    if not (config.rollout.engine.colocated and generates(config)):
        return None
    memory = None if handles is None else handles.memory
    return GpuSharing(process.sync, backend, memory, timeout_s=all_engines_timeout_s(config))


def build_utilization(
    config: Config, process: Process, credit: CreditAssignment
) -> Utilization | None:
    """Make the measurement of `perf/mfu`; None if the GPU's peak is unknown."""
    from backends.megatron.convert.read import read_architecture

    peak = None
    if config.tracking.peak_tflops is not None:
        peak = config.tracking.peak_tflops * 1e12
    elif process.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(process.device))
    if peak is None:
        return None
    shape = read_architecture(config.model.path).shape
    return Utilization(
        shape,
        peak * process.sync.world_size,
        scores_policy=credit.passes.policy,
        trains_adapters=config.policy.lora is not None,
    )


def build_rank0(
    loaded: Loaded,
    process: Process,
    handles: RolloutHandles,
    run: OpenRun,
    journal: VersionJournal,
    backend: PolicyBackend,
    credit: CreditAssignment,
    steps: int,
    stack: ExitStack,
) -> RankZero:
    """Make rank 0's own parts, and start its trackers; `stack` closes them if nobody else does."""
    config = loaded.config
    found = run.resume_from
    tracker = build_trackers(
        config, run.directory, found.state["tracker"] if found else None, total_steps=steps
    )
    threads = f"{torch.get_num_threads()} a process (run.threads)"
    stack.callback(tracker.close, "failed")
    tracker.start({"run": str(run.directory.path), **backend.describe(), "threads": threads})
    if handles.prompt_lengths is not None:
        tracker.show_prompt_lengths(handles.prompt_lengths)
    rank0 = RankZero(
        config,
        source=handles.source,
        held_out=handles.held_out,
        tracker=tracker,
        directory=run.directory,
        checkpoints=run.checkpoints,
        total_steps=steps,
        interrupted=lambda: process.sync.interrupt_requested,
        newest_version=lambda: journal.last,
        resume_from=found,
        replay_from=replay_from(config),
        origins=loaded.origins,
        utilization=build_utilization(config, process, credit),
    )
    for note in (*loaded.warnings, *prompt_warnings(config, handles.num_prompts)):
        tracker.note(note)
    if rank0.early_stopping is not None:
        tracker.note(rank0.early_stopping.armed)
    return rank0


def replay_from(config: Config) -> Path | None:
    """Return the shards that a replay starts from, if configured."""
    path = config.training.replay_from
    return None if path is None else find_checkpoint(Path(path), "training.replay_from")
