"""Which layouts of ranks are refused. Imports neither torch nor Megatron: plans and login nodes ask too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from backends.megatron.checks.experts import check_experts
from backends.megatron.parallel.stages import layers_of_stages, nearest_divisor
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from backends.megatron.convert.architecture import Architecture


def check_layout(arch: Architecture, parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a layout that the model or the number of processes does not admit.

    Raises ConfigError naming the key, what it divides and what to do. Asks neither torch.distributed nor Megatron.
    """
    tp, pp = parallel.tensor, parallel.pipeline
    _check_supported(parallel)
    replica = tp * pp * parallel.context
    if world_size % replica:
        raise ConfigError(
            f"policy.parallel: tensor {tp} x pipeline {pp} x context {parallel.context} = {replica} does not divide the world "
            f"size {world_size}; start a multiple of {replica} processes, or lay it out over a divisor of {world_size}"
        )
    model = arch.transformer
    heads, groups = model["num_attention_heads"], model.get("num_query_groups") or model["num_attention_heads"]
    sizes = [("attention heads", heads), ("KV groups", groups), ("feed-forward width", model["ffn_hidden_size"])]
    if arch.latent_attention:       # tensor parallelism cuts the projections to the low-rank forms too
        sizes.append(("kv_lora_rank + qk_rope_head_dim", model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]))
        sizes.append(("q_lora_rank", model["q_lora_rank"] or heads))
    for what, size in sizes:
        if size % tp:
            nearest = nearest_divisor(tp, *(size for _, size in sizes))
            raise ConfigError(f"policy.parallel.tensor: {tp} does not divide the model's {what} ({size}); set it to {nearest}")
    layers_of_stages(model["num_layers"], parallel)
    check_experts(arch, parallel, world_size)


def check_others(others: Mapping[str, Architecture], parallel: ParallelConfig, world_size: int) -> None:
    """As `check_layout`, of the models that are laid out as the policy is, by the keys that name their folders."""
    for key, arch in others.items():
        try:
            check_layout(arch, parallel, world_size)
        except ConfigError as error:
            raise ConfigError(f"{key}: {arch.folder} does not fit the policy's layout: {error}") from error


def _check_supported(parallel: ParallelConfig) -> None:
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError("policy.parallel.virtual_pipeline: needs pipeline > 1; set it to 1")
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("policy.parallel.sequence: sequence parallelism needs tensor > 1; set it to false")
