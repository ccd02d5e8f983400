"""Models from a configuration: architecture, chunks, weights, wrappers, optimizer.

Policy and critic are trained. The reference and the teacher only score; their weights are on the
device, or in host memory between passes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from backends.megatron.checkpoint.save_load import MANIFEST, Adapters, base_of, load_weights
from backends.megatron.checks.layout import check_layout, check_vocabularies
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.layout import named_weights
from backends.megatron.convert.load import load_adapters, load_hf
from backends.megatron.convert.read import read_architecture
from backends.megatron.model.gpt import build_chunks, in_dtype, transformer_config, with_gradients
from backends.megatron.model.layers import layer_fields, layers_of
from backends.megatron.model.lora import attach, named_factors
from backends.megatron.model.routing_replay import replay_routing
from backends.megatron.parallel.agreement import raise_on_all_ranks
from backends.megatron.parallel.state import ParallelState
from backends.megatron.training.offload import OffloadedTensors, Retention
from backends.megatron.training.optimizer import ScheduledOptimizer
from backends.megatron.training.passes import Frozen, Model, SwappedIn, copy_weights, weights_of
from rlcore.adapter_folder import read_policies
from rlcore.config import Config
from rlcore.config.derived import generates
from rlcore.config.sections.policy import LoraConfig, OptimizerConfig
from rlcore.errors import ConfigError
from rlcore.planning.memory import padded_vocab_size
from rlcore.timeline.start import START
from rlcore.weights import DTYPES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildContext:
    """The inputs that the models of a run share."""

    config: Config
    arch: Architecture  # the policy's
    parallel: ParallelState
    device: torch.device
    weights: bool = True  # read weights; a dry run has folders without weights

    def build(self, arch: Architecture, *, value_head: bool = False) -> Model:
        """Build a model without weights, gradients or optimizer."""
        policy = self.config.policy
        model = self.config.model
        overrides = {
            **({"deterministic_mode": True} if self.config.run.deterministic else {}),
            **policy.megatron,
        }
        layers = layers_of(self.config, self.device.type, local_part=arch.local_part)
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

    def start_training(self, model: Model, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Add gradient buffers and an optimizer to a model that has its weights."""
        with START.phase("optimizer"):
            model.modules = with_gradients(
                model.modules,
                model.config,
                distributed_optimizer=optimizer.distributed,
                grad_reduce_in_fp32=optimizer.grad_reduce_in_fp32,
                overlap=optimizer.overlap,
            )
            dtype = DTYPES[self.config.model.dtype]
            gradients = OffloadedTensors(
                model._gradients, self.device, Retention.SCRATCH, keep_on_device=True
            )
            # An offloaded optimizer has its fp32 weights on the device while it is built: where
            # the gradients will be.
            gradients.offload()
            model.optimizer = ScheduledOptimizer(
                optimizer, model.modules, params_dtype=dtype, total_steps=total_steps
            )
            gradients.onload()
            model.config.finalize_model_grads_func = finalize_model_grads
            # Gradients in fp32 or bf16 need no loss scale.
            model.config.grad_scale_func = None

    def adapt(self, model: Model) -> None:
        """Give a model that has its weights the adapters of `policy.lora`, if there are any."""
        lora = self.config.policy.lora
        if lora is not None:
            attach(model.chunks, model.arch, lora, seed=self.config.run.seed)

    def load(self, model: Model, arch: Architecture, path: str) -> None:
        """Read the weights of a Hugging Face folder into a model. Collective.

        If one rank cannot read the folder, every rank raises.
        """
        if self.weights:
            failing = raise_on_all_ranks(self.parallel, f"reading the weights of {path}")
            with START.phase("weights"), failing:
                load_hf(model.chunks, arch, Path(path), self.parallel)

    def load_adapters(
        self, factors: Mapping[str, Tensor], lora: LoraConfig, path: str, key: str
    ) -> None:
        """Fill this rank's factors of the policy from a PEFT folder, as `load` does."""
        if self.weights:
            with raise_on_all_ranks(self.parallel, f"reading the adapters of {path}"):
                load_adapters(factors, self.arch, lora, self.parallel, Path(path), key)

    def other_architecture(self, path: str | None, key: str) -> Architecture:
        """Read the architecture of a second model, and check its vocabulary and layout.

        Collective, as `load` is.
        """
        if path is None:
            # Only the policy is trained to predict further tokens.
            return replace(self.arch, mtp=False)
        with raise_on_all_ranks(self.parallel, f"reading {key} {path}"):
            arch = read_architecture(path, weights=self.weights)
            check_vocabularies({key: arch}, self.arch)
            check_layout(arch, self.config.policy.parallel, self.parallel.world_size)
        return arch


def build_policy(context: BuildContext) -> Model:
    """Build the policy with its initial weights and adapters; it is not trainable yet."""
    config = context.config
    lora = config.policy.lora
    model = context.build(context.arch)
    checkpoint = None if config.policy.checkpoint is None else Path(config.policy.checkpoint)
    base = base_path(context)
    if context.parallel.rank == 0 and context.weights and generates(config):
        warn_of_other_bases(config, base)
    if base != checkpoint and not (base / MANIFEST).is_file():
        context.load(model, context.arch, str(base))
    elif context.weights:
        with START.phase("weights"):
            load_weights(base, "policy", context.arch, model.chunks, context.parallel)
    if config.policy.routing_replay != "none":
        replay_routing(model.chunks, context.arch)
    context.adapt(model)
    if lora is None or not context.weights:
        return model
    if checkpoint is not None and base != checkpoint:
        load_weights(
            checkpoint, "policy", context.arch, model.chunks, context.parallel, Adapters(lora, base)
        )
    elif lora.path is not None:
        context.load_adapters(named_factors(model.chunks), lora, lora.path, "policy.lora.path")
    return model


def warn_of_other_bases(config: Config, base: Path) -> None:
    """Log which frozen policies were trained on other weights than `base`."""
    for folder in read_policies(config.rollout.policies).values():
        # A name on the hub, or a folder of another machine, cannot be compared.
        other = Path(folder.base)
        if folder.base and other.exists() and other.resolve() != base.resolve():
            logger.warning(
                "%s: %s was trained on %s, and this run's model is %s: unless the weights are the"
                " same, it answers otherwise than it did",
                *(folder.key, folder.path, other, base),
            )


def base_path(context: BuildContext) -> Path:
    """The folder or checkpoint with the policy's initial weights, below any adapters."""
    config = context.config
    if config.policy.checkpoint is None:
        return Path(config.model.path)
    checkpoint = Path(config.policy.checkpoint)
    below = None
    if config.policy.lora is not None and context.weights:
        with raise_on_all_ranks(context.parallel, f"reading the checkpoint {checkpoint}"):
            below = base_of(checkpoint, "policy")
    return below or checkpoint


def build_critic(context: BuildContext, policy: Model, total_steps: int) -> Model:
    """Build the trainable value model.

    It has the weights and head of `critic.path`, or the initial policy's weights and a fresh head.
    With adapters these weights are the policy's own, of which there is no second copy.
    """
    critic = context.config.critic
    arch = context.other_architecture(critic.path, "critic.path")
    model = context.build(arch, value_head=True)
    if critic.path is None:
        # The two models have everything in common except their heads.
        model.base = policy if context.config.policy.lora is not None else None
        for own, other in zip(model.chunks, policy.chunks):
            given = dict(named_weights(other))
            for name, weight in named_weights(own):
                if name in given and model.base is not None:
                    weight.data = given[name].data
                elif name in given:
                    copy_weights([given[name]], [weight])
    else:
        context.load(model, arch, critic.path)
    context.adapt(model)
    context.start_training(
        model,
        critic.optimizer.model_copy(update={"offload": critic.optimizer.offload or critic.offload}),
        total_steps,
    )
    model.make_offloadable(context.device, offload=critic.offload)
    return model


def build_frozen(
    context: BuildContext, policy: Model, name: Literal["reference", "teacher"]
) -> Frozen:
    """Build the reference model for KL, or the teacher. Call before training starts.

    The reference is `reference.path`, by default the current policy: a copy, or a copy of its
    adapters, or the adapters of `reference.policy`. The teacher may have any size, but has the
    policy's vocabulary and layout.

    Raises:
        ConfigError: `teacher.path` is not given, or the policy's layout does not fit.
        ModelError: the vocabulary is not the policy's.
    """
    given = context.config.reference if name == "reference" else context.config.teacher
    path = given.path
    if path is None and name == "teacher":
        raise ConfigError("teacher.path: missing: name the model to learn from")
    arch = context.other_architecture(path, f"{name}.path")
    lora = context.config.policy.lora
    if lora is not None and path is None:
        # The policy differs from what it was in its adapters alone.
        factors = named_factors(policy.chunks)
        others = {key: _host_copy(factor) for key, factor in factors.items()}
        chosen = context.config.reference.policy if name == "reference" else None
        if chosen is not None:
            folder = context.config.rollout.policies[chosen]
            context.load_adapters(others, lora, folder, f"rollout.policies.{chosen}")
        return SwappedIn(policy, list(factors.values()), list(others.values()))
    if given.offload and lora is None and arch.computes_like(context.arch):
        own = weights_of(policy.chunks)
        weights = initial = [_host_copy(weight) for weight in own]
        if path is not None:
            # Read through the policy's modules, then restore the policy's own weights.
            context.load(policy, arch, path)
            weights = [_host_copy(weight) for weight in own]
            copy_weights(initial, own)
        return SwappedIn(policy, own, weights)
    model = context.build(arch)
    if path is None:
        for own, other in zip(model.chunks, policy.chunks):
            held = dict(named_weights(other))
            copy_weights([held[name] for name, _ in named_weights(own)], weights_of([own]))
    else:
        context.load(model, arch, path)
    # Passes run without gradients, but the weights keep `requires_grad`, with which torch.matmul
    # folds [T, 1, H] to a matrix; otherwise it might expand the weight to [T, H, H']. So the
    # reference computes the same as the policy, bit for bit.
    for module in model.modules:
        module.eval()
    model.make_offloadable(context.device, offload=given.offload)
    return model


@torch.no_grad()
def _host_copy(parameter: Tensor) -> Tensor:
    host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
    return host.copy_(parameter)
