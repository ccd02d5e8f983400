"""A rank of test_router_bias.py: save under the first layout, load and export under each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from backends.megatron.cpu.shim import importing_megatron, megatron_device

with importing_megatron():
    from backends.megatron.checkpoint.save_load import (
        Saved,
        load_checkpoint,
        load_weights,
        save_checkpoint,
    )
    from backends.megatron.model.gpt import with_gradients
    from backends.megatron.parallel.state import ParallelState, destroy_parallel, init_parallel
    from backends.megatron.training.optimizer import ScheduledOptimizer
    from backends.megatron.weights.export import WeightExporter
    from backends.megatron.weights.folder import export_hf
from rlcore.config.sections.policy import OptimizerConfig, ParallelConfig
from rlcore.weights import DTYPES
from tests.parity.rank_main import joined, load_chunks, payload


def build(source: Path, layout: ParallelConfig, parallel: ParallelState, dtype: str) -> Saved:
    arch, config, built = load_chunks(source, layout, parallel, dtype)
    modules = with_gradients(built, config, distributed_optimizer=False)
    optimizer = ScheduledOptimizer(
        OptimizerConfig(lr=0.5, weight_decay=0.1, clip_grad=0),
        modules,
        params_dtype=DTYPES[dtype],
        total_steps=10,
    )
    return Saved("policy", arch, modules, optimizer)


def export(model: Saved, parallel: ParallelState, dtype: str, folder: Path) -> None:
    export_hf(WeightExporter(model.chunks, model.arch, parallel, dtype=DTYPES[dtype]), folder)


def run(given: dict[str, Any]) -> None:
    root = Path(given["root"])
    dtype = given["dtype"]
    for name, keys in given["layouts"].items():
        layout = ParallelConfig(**keys)
        with megatron_device("cpu"):
            parallel = init_parallel(layout, timeout_s=60, seed=0)
            if name == given["saved_under"]:
                model = build(Path(given["source"]), layout, parallel, dtype)
                assert model.optimizer is not None
                for module in model.chunks:
                    for parameter in module.parameters():
                        parameter.main_grad.fill_(1.0)
                assert not model.optimizer.step().skipped
                save_checkpoint(root / "checkpoint", [model], parallel)
                export(model, parallel, dtype, root / "saved")
            model = build(Path(given["other"]), layout, parallel, dtype)
            if name == given["saved_under"]:
                load_checkpoint(root / "checkpoint", [model], parallel)
            else:
                load_weights(root / "checkpoint", "policy", model.arch, model.chunks, parallel)
            export(model, parallel, dtype, root / name)
            destroy_parallel()


if __name__ == "__main__":
    with joined(Path(sys.argv[1]), alone=True):
        run(payload(Path(sys.argv[1])))
