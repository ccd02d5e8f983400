"""Trained models from a configuration: architecture, chunks, weights, wrappers, optimizer.

The module `frozen` builds the models that stay frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from backends.megatron.checkpoint.save_load import load_weights
from backends.megatron.checks.layout import check_layout, check_vocabularies
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.load import load_hf
from backends.megatron.convert.read import read_architecture
from backends.megatron.model.gpt import (
    build_chunks,
    in_dtype,
    padded_vocab_size,
    transformer_config,
    with_gradients,
)
from backends.megatron.model.layers import layer_fields, layers_of
from backends.megatron.model.routing_replay import replay_routing
from backends.megatron.parallel.state import ParallelState
from backends.megatron.training.optimizer import ScheduledOptimizer
from backends.megatron.training.passes import Model
from backends.megatron.weights.copies import copy_trunk
from rlcore.config import Config
from rlcore.config.sections.policy import OptimizerConfig
from rlcore.weights import DTYPES


@dataclass(frozen=True)
class BuildContext:
    """Everything that the models of a run share."""

    config: Config
    arch: Architecture  # the policy's
    parallel: ParallelState
    device: torch.device
    total_steps: int

    def build(self, arch: Architecture, *, value_head: bool = False) -> Model:
        """Build a model without weights, gradients or optimizer."""
        policy = self.config.policy
        model = self.config.model
        overrides = {
            **({"deterministic_mode": True} if self.config.run.deterministic else {}),
            **policy.megatron,
        }
        layers = layers_of(self.config, self.device.type, latent=arch.latent_attention)
        fields = layer_fields(layers, experts=bool(arch.num_experts), fp8=policy.fp8)
        config = transformer_config(
            arch, policy.parallel, model.dtype, self.device, overrides, fields
        )
        chunks = build_chunks(
            arch,
            config,
            padded_vocab=padded_vocab_size(
                arch.vocab_size, model.vocab_divisible_by, policy.parallel.tensor
            ),
            value_head=value_head,
            seed=self.config.run.seed,
        )
        return Model(arch, config, chunks, in_dtype(chunks, config))

    def start_training(self, model: Model, optimizer: OptimizerConfig) -> None:
        """Put gradient buffers and an optimizer around a model that has its weights."""
        model.modules = with_gradients(
            model.modules,
            model.config,
            distributed_optimizer=optimizer.distributed,
            overlap=optimizer.overlap,
        )
        dtype = DTYPES[self.config.model.dtype]
        model.attach_optimizer(
            ScheduledOptimizer(
                optimizer, model.modules, params_dtype=dtype, total_steps=self.total_steps
            )
        )

    def other_architecture(self, path: str | None, key: str) -> Architecture:
        """Read the architecture of a second model, and check its vocabulary and layout."""
        if path is None:
            return self.arch
        arch = read_architecture(path, bridge=self.config.model.bridge)
        check_vocabularies({key: arch}, self.arch)
        check_layout(arch, self.config.policy.parallel, self.parallel.world_size)
        return arch


def build_policy(context: BuildContext) -> Model:
    """Build the policy with its initial weights, not yet trainable."""
    model = context.build(context.arch)
    checkpoint = context.config.policy.checkpoint
    if checkpoint is None:
        load_hf(model.chunks, context.arch, Path(context.config.model.path), context.parallel)
    else:
        load_weights(Path(checkpoint), "policy", context.arch, model.chunks, context.parallel)
    if context.config.policy.routing_replay != "none":
        replay_routing(model.chunks, context.arch)
    return model


def build_critic(context: BuildContext, policy: Model) -> Model:
    """Build the trainable value model.

    It has the weights and head of `critic.path`, or the initial policy's weights and a fresh head.
    """
    critic = context.config.critic
    arch = context.other_architecture(critic.path, "critic.path")
    model = context.build(arch, value_head=True)
    if critic.path is None:
        copy_trunk(policy.chunks, model.chunks)
    else:
        load_hf(model.chunks, arch, Path(critic.path), context.parallel)
    context.start_training(
        model,
        critic.optimizer.model_copy(update={"offload": critic.optimizer.offload or critic.offload}),
    )
    model.make_offloadable(context.device, offload=critic.offload)
    return model
