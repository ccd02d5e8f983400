"""A case of test_checkpoint.py on a rank: train and save, or load; then export, step and export.

A step's gradient is a Hugging Face folder times a number, so it is the same under every layout, and
without clipping AdamW works element by element: all layouts must agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from optimizer_state import export_state
from torch import nn

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.layout import owned_parameters
from backends.megatron.convert.load import load_hf
from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.checkpoint.save_load import Saved, load_checkpoint, save_checkpoint
    from backends.megatron.model.gpt import (
        build_chunks,
        in_dtype,
        transformer_config,
        with_gradients,
    )
    from backends.megatron.parallel.state import ParallelState
    from backends.megatron.training.optimizer import ScheduledOptimizer
    from backends.megatron.weights.export import WeightExporter
    from backends.megatron.weights.folder import export_hf
from rlcore.config.sections.policy import OptimizerConfig, ParallelConfig
from rlcore.planning.memory import padded_vocab_size
from rlcore.weights import DTYPES

GRADIENT_SCALE = (1.0, -0.5, 2.0)


class Trained:
    """One model with its optimizer, and the folder that its gradients are made of."""

    def __init__(
        self,
        name: str,
        source: Path,
        variant: dict[str, Any],
        layout: ParallelConfig,
        parallel: ParallelState,
    ) -> None:
        arch = read_architecture(source)
        config = transformer_config(arch, layout, variant["dtype"], torch.device("cpu"), {})
        built = build(arch, config, layout, value_head=name == "critic")
        load_hf(built, arch, source, parallel)
        modules = with_gradients(
            in_dtype(built, config), config, distributed_optimizer=variant["distributed"]
        )
        optimizer_config = OptimizerConfig(
            lr=0.01,
            warmup_steps=2,
            weight_decay=0.1,
            clip_grad=0,
            distributed=variant["distributed"],
        )
        self.optimizer = ScheduledOptimizer(
            optimizer_config, modules, params_dtype=DTYPES[variant["dtype"]], total_steps=10
        )
        self.saved = Saved(name, arch, modules, self.optimizer)
        self.blank = []
        if variant.get("optimizer_state"):
            blank_config = transformer_config(arch, layout, "fp32", torch.device("cpu"), {})
            self.blank = build(arch, blank_config, layout, value_head=name == "critic")
        self.source = source
        self.parallel = parallel
        self.dtype = DTYPES[variant["dtype"]]
        self.gradients = read_gradients(modules, arch, source, parallel)

    def step(self, number: int) -> None:
        for parameter, gradient in self.gradients:
            parameter.main_grad.copy_(gradient * GRADIENT_SCALE[number])
        assert not self.optimizer.step().skipped

    def export(self, folder: Path, **options: Any) -> None:
        """The weights; where the variant asks for it, the optimizer's state beside them."""
        chunks = self.saved.chunks
        arch = self.saved.arch
        head = self.saved.head
        exporter = WeightExporter(chunks, arch, self.parallel, dtype=self.dtype, head=head)
        export_hf(exporter, folder / self.saved.name, **options)
        if self.blank:
            export_state(
                folder / f"{self.saved.name}_optimizer",
                self.optimizer,
                chunks,
                self.blank,
                arch,
                self.parallel,
                head=head,
            )


def build(
    arch: Architecture, config: Any, layout: ParallelConfig, *, value_head: bool
) -> list[Any]:
    padded = padded_vocab_size(arch.vocab_size, 1, layout.tensor)
    return build_chunks(arch, config, padded_vocab=padded, value_head=value_head, seed=1)


def read_gradients(
    modules: Sequence[nn.Module], arch: Architecture, source: Path, parallel: ParallelState
) -> list[tuple[Any, torch.Tensor]]:
    """(parameter, fp32 gradient): the folder's own values, put through the loading of weights."""
    parameters = [parameter for _, parameter, _ in owned_parameters(modules, arch)]
    before = [parameter.detach().clone() for parameter in parameters]
    load_hf(modules, arch, source, parallel)
    found = [(parameter, parameter.detach().float()) for parameter in parameters]
    for parameter, value in zip(parameters, before):
        parameter.data.copy_(value)
    return [(parameter, gradient.clone()) for parameter, gradient in found]


def train_and_save_or_load(
    job: dict[str, Any], layout: ParallelConfig, parallel: ParallelState
) -> None:
    """Two steps and a save, or a load; then a third step. Exports before and after it."""
    variant = job["variant"]
    models = [
        Trained(name, Path(path), variant, layout, parallel)
        for name, path in job["sources"].items()
    ]
    saved = [model.saved for model in models]
    if "save" in job:
        for model in models:
            if not (variant.get("critic_warmup") and model.saved.name == "policy"):
                model.step(0)
                model.step(1)
        save_checkpoint(Path(job["save"]), saved, parallel)
    else:
        load_checkpoint(Path(job["load"]), saved, parallel)
    for model in models:
        model.export(Path(job["before"]))
        model.step(2)
        model.export(Path(job["after"]))
