"""Which layouts of experts are right: over how many ranks the experts, and each expert's matrices, may be cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.megatron.parallel.stages import nearest_divisor
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from backends.megatron.convert.architecture import Architecture


def check_experts(arch: Architecture, parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a layout of experts that does not fit the model or the ranks, or whose gradients would be wrong.

    Raises ConfigError naming the key, the reason and the nearest layout that is right.
    """
    tp, pp, ep = parallel.tensor, parallel.pipeline, parallel.expert
    etp = tp if parallel.expert_tensor is None else parallel.expert_tensor
    if not arch.num_experts:
        if ep > 1 or etp != tp:
            key = "expert" if ep > 1 else "expert_tensor"
            raise ConfigError(f"policy.parallel.{key}: the {arch.family} model has no experts to lay out; leave it out")
        return
    if tp > 1 and not parallel.sequence:
        raise ConfigError(
            f"policy.parallel.sequence: false, but experts under tensor {tp} need sequence parallelism: else every "
            "tensor-parallel rank would send all tokens to them; set it to true"
        )
    _check_sizes(arch, tp, etp, ep)
    if ep == 1 and etp != tp:
        raise ConfigError(
            f"policy.parallel: tensor {tp}, expert_tensor {etp}, expert 1: megatron-core sums the gradients of experts over "
            f"the data-parallel ranks of the dense weights, which misses the copies that the tensor-parallel ranks hold; leave "
            f"expert_tensor out{'' if arch.num_experts % (tp // etp) else f', or set expert={tp // etp}'}"
        )
    if world_size % (etp * ep * pp):
        smaller = nearest_divisor(ep, arch.num_experts, world_size // (etp * pp))
        raise ConfigError(
            f"policy.parallel: expert_tensor {etp} x expert {ep} x pipeline {pp} = {etp * ep * pp} does not divide the world "
            f"size {world_size}; start a multiple of it, or set expert={smaller}"
        )


def _check_sizes(arch: Architecture, tp: int, etp: int, ep: int) -> None:
    if tp % etp:
        raise ConfigError(
            f"policy.parallel.expert_tensor: {etp} does not divide tensor ({tp}); leave it out, or set it to "
            f"{nearest_divisor(etp, tp)}"
        )
    if arch.num_experts % ep:
        raise ConfigError(
            f"policy.parallel.expert: {ep} does not divide the model's experts ({arch.num_experts}); set it to "
            f"{nearest_divisor(ep, arch.num_experts)}"
        )
    for key, size, what in (
        ("expert_tensor", etp, "moe_ffn_hidden_size"), ("tensor", tp, "moe_shared_expert_intermediate_size")
    ):  # fmt: skip
        width = arch.transformer.get(what)
        if width and width % size:
            raise ConfigError(
                f"policy.parallel.{key}: {size} does not divide an expert's width ({width}); set it to "
                f"{nearest_divisor(size, width, tp)}"
            )
