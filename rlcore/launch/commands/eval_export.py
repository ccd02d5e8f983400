"""`rlcore eval` scores a model, `rlcore export` writes it as a Hugging Face folder."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rlcore.config import Config
from rlcore.config.load import Loaded, load_config
from rlcore.config.sections.algorithm import LossConfig
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import RunFailed, UserError
from rlcore.interfaces import PolicyBackend
from rlcore.launch.compose import (
    build_algorithm,
    build_backend,
    build_gpu_sharing,
    build_weight_publisher,
    check_model,
    export_policy,
    open_handles,
)
from rlcore.launch.process import Process, join
from rlcore.launch.run_folder import find_checkpoint, pin_initial_policy
from rlcore.runs.directory import RunDirectory
from rlcore.runs.versions import VersionJournal
from rlcore.tracking.format import pick_samples, sample_lines
from rlcore.trainer.gpu_sharing import GpuPhase


def evaluate_model(loaded: Loaded, *, output: Path | None) -> int:
    """Score the configured weights on the evaluation prompts; print scores and a few samples."""
    config = _generating(_in_one_process(pin_initial_policy(loaded, resume=False).config))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        config.run.dir = str(scratch)
        config.run.name = "eval"
        process = stack.enter_context(join(config))
        check_model(config, 1)
        handles = open_handles(config, process, stack)
        backend = _policy_only(config, process, stack)
        sharing = build_gpu_sharing(config, process, backend, handles)

        def switch_to(phase: GpuPhase) -> None:
            if sharing is not None:
                sharing.switch_to(phase)

        handles.source.start()
        publisher = build_weight_publisher(
            config, process, backend, handles, VersionJournal(scratch / "versions.jsonl")
        )
        assert publisher is not None
        switch_to(GpuPhase.HANDOVER)
        if lost := publisher.publish(0):
            raise RunFailed(lost)
        switch_to(GpuPhase.GENERATING)
        while (scored := handles.source.evaluate()) is None:
            switch_to(GpuPhase.HANDOVER)
            if lost := publisher.catch_up():
                raise RunFailed(lost)
            switch_to(GpuPhase.GENERATING)
    metrics, samples = scored
    for sample in pick_samples(samples, config.tracking.show_samples):
        print("\n".join(sample_lines(sample)))
    for name, value in metrics.items():
        print(f"{name:24} {value:.6g}")
    if output is not None:
        output.write_text(json.dumps({"samples": len(samples), **metrics}, indent=2) + "\n")
    return 0


def export_checkpoint(source: Path, folder: Path) -> int:
    """Write a checkpoint of any layout as a Hugging Face folder, on the CPU, without the model."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another folder")
    shards = find_checkpoint(source, "export")
    run = RunDirectory(
        next((p for p in (source, *source.parents) if (p / "config.yaml").is_file()), source)
    )
    if not run.config_path.is_file():
        raise UserError(
            f"{source}: no config.yaml in it or above it; expected a run or one of its checkpoints"
        )
    export_policy(load_config([run.config_path]).config, shards, folder)
    print(f"wrote {folder}")
    return 0


def _in_one_process(config: Config) -> Config:
    """Return the configuration without a layout, for one process that trains nothing."""
    config = config.model_copy(deep=True)
    config.policy.parallel = ParallelConfig()
    config.policy.optimizer.distributed = False
    config.cluster.launcher = "local"
    config.cluster.processes_per_node = 1
    return config


def _generating(config: Config) -> Config:
    """Make a supervised run or a replay, which have no engine, one that generates."""
    config.training.debug = None
    config.training.replay = None
    config.training.replay_from = None
    if config.is_sft:
        config.algorithm.loss = LossConfig()
    return config


def _policy_only(config: Config, process: Process, stack: ExitStack) -> PolicyBackend:
    objective, _ = build_algorithm(config)
    backend = build_backend(config, process, objective, None, optimizer_steps=1)
    stack.callback(backend.close)
    return backend
