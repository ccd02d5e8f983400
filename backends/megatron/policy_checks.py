"""Checks of models and the policy's section, made before any rank starts."""

from __future__ import annotations

import torch

from backends.megatron.convert.adapters import adapted_layers
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.peft_folder import check_factors
from backends.megatron.model.layers import layer_fields, layers_of
from rlcore.adapter_folder import read_policies
from rlcore.config import Config
from rlcore.config.derived import generates
from rlcore.errors import ConfigError


def check_policy(config: Config, arch: Architecture, device: str | None) -> None:
    """Refuse routing replay without experts, adapters of other models, and wrong Megatron fields.

    Megatron is imported only where `policy.megatron` has fields: the import takes seconds.

    Args:
        device: "cpu" or "cuda"; None: the run will be on another machine, so checks that depend on
            the machine are skipped.

    Raises ConfigError, or ModelError for a folder, naming the key, the reason and a remedy.
    """
    policy = config.policy
    if policy.routing_replay != "none" and not arch.num_experts:
        raise ConfigError(
            f"policy.routing_replay: the {arch.family} model has no experts to replay; set it to"
            " none"
        )
    if policy.lora is not None:
        adapted_layers(arch, policy.lora)
    for folder in read_policies(config.rollout.policies if generates(config) else {}).values():
        check_factors(folder, arch)
    if device == "cuda" and arch.table.sinks and config.model.dtype == "fp32":
        raise ConfigError(
            f"model.dtype: fp32, but {arch.family} has sinks, for which torch's kernels on CUDA"
            " need half precision; set it to bf16"
        )
    layers = None if device is None else layers_of(config, device, local_part=arch.local_part)
    if not policy.megatron:
        return
    from backends.megatron.cpu.shim import expected_warnings_off, importing_megatron

    with importing_megatron():
        from backends.megatron.checks.transformer_fields import check_overrides, check_recompute
        from backends.megatron.model.gpt import transformer_config
    if device is None or layers is None:
        check_overrides(policy.megatron, arch)
        check_recompute(policy.megatron, arch, policy.parallel)
        return
    with expected_warnings_off():
        fields = layer_fields(layers, experts=bool(arch.num_experts), fp8=policy.fp8)
        transformer_config(
            arch, policy.parallel, config.model.dtype, torch.device(device), policy.megatron, fields
        )
