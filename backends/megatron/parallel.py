"""How the ranks are laid out: sizes, places and process groups. The only module that asks Megatron's `parallel_state`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlcore.config.policy import ParallelConfig
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from backends.megatron.convert.architecture import Architecture


@dataclass(frozen=True)
class ParallelState:
    """This rank's place. `tp`, `pp`, `dp`, `cp`, `ep`: tensor, pipeline, data, context, expert parallelism.

    A replica is the set of ranks that hold one copy of the model and work on the same sequences: one data-parallel index.
    """

    rank: int
    world_size: int
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    dp_size: int                # context parallelism not counted
    dp_rank: int
    cp_size: int
    cp_rank: int
    ep_size: int
    ep_rank: int
    vpp_size: int               # model chunks of this rank
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    dp_group: ProcessGroup
    cp_group: ProcessGroup
    dp_cp_group: ProcessGroup
    mp_group: ProcessGroup      # tensor x pipeline
    pp_last_rank: int           # global rank of the last stage of this rank's pipeline
    control_group: ProcessGroup     # all ranks, gloo: batches, vectors and decisions travel here, on CUDA too
    replica_group: ProcessGroup     # the ranks of this replica, gloo
    replica_leaders: tuple[int, ...]    # [dp_size] global rank of the first rank of each replica
    score_sources: tuple[int, ...]      # [dp_size] global rank of one rank of each replica's last stage

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @classmethod
    def from_mpu(cls, mpu: Any, *, timeout_s: float) -> ParallelState:
        """Read the layout after `init_parallel`; creates the gloo groups. Collective."""
        timeout = timedelta(seconds=timeout_s)
        world_size, dp_rank, dp_size = dist.get_world_size(), mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        control = dist.new_group(backend="gloo", timeout=timeout, group_desc="CONTROL")
        pp_rank, pp_size = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
        places = [torch.zeros(2, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(places, torch.tensor([dp_rank, pp_rank]), group=control)
        indices, stages = zip(*(place.tolist() for place in places))
        replicas = [[rank for rank in range(world_size) if indices[rank] == d] for d in range(dp_size)]
        groups = [
            dist.new_group(ranks, backend="gloo", timeout=timeout, group_desc=f"REPLICA_{d}")
            for d, ranks in enumerate(replicas)
        ]
        return cls(
            rank=dist.get_rank(),
            world_size=world_size,
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            pp_size=pp_size,
            pp_rank=pp_rank,
            dp_size=dp_size,
            dp_rank=dp_rank,
            cp_size=mpu.get_context_parallel_world_size(),
            cp_rank=mpu.get_context_parallel_rank(),
            ep_size=mpu.get_expert_model_parallel_world_size(),
            ep_rank=mpu.get_expert_model_parallel_rank(),
            vpp_size=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
            tp_group=mpu.get_tensor_model_parallel_group(),
            pp_group=mpu.get_pipeline_model_parallel_group(),
            dp_group=mpu.get_data_parallel_group(),
            cp_group=mpu.get_context_parallel_group(),
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
            mp_group=mpu.get_model_parallel_group(),
            pp_last_rank=mpu.get_pipeline_model_parallel_last_rank(),
            control_group=control,
            replica_group=groups[dp_rank],
            replica_leaders=tuple(ranks[0] for ranks in replicas),
            score_sources=tuple(next(rank for rank in ranks if stages[rank] == pp_size - 1) for ranks in replicas),
        )


def check_layout(arch: Architecture, parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a layout that the model or the number of processes does not admit.

    Raises ConfigError naming the key, what it divides and what to do. Asks neither torch.distributed nor Megatron.
    """
    tp, pp, vpp = parallel.tensor, parallel.pipeline, parallel.virtual_pipeline
    _check_supported(parallel)
    replica = tp * pp * parallel.context
    if world_size % replica:
        raise ConfigError(
            f"policy.parallel: tensor {tp} x pipeline {pp} x context {parallel.context} = {replica} does not divide the world "
            f"size {world_size}; start a multiple of {replica} processes or change the layout"
        )
    model = arch.transformer
    heads, groups = model["num_attention_heads"], model.get("num_query_groups") or model["num_attention_heads"]
    for what, size in (("attention heads", heads), ("KV groups", groups), ("feed-forward width", model["ffn_hidden_size"])):
        if size % tp:
            raise ConfigError(
                f"policy.parallel.tensor: {tp} does not divide the model's {what} ({size}); choose a divisor of {size}"
            )
    layers = model["num_layers"]
    if layers % (pp * vpp):
        raise ConfigError(
            f"policy.parallel: pipeline {pp} x virtual_pipeline {vpp} does not divide the model's {layers} layers; "
            f"choose stages that hold the same number of layers"
        )


def _check_supported(parallel: ParallelConfig) -> None:
    if parallel.context > 1 or parallel.expert > 1 or (parallel.expert_tensor or parallel.tensor) != parallel.tensor:
        raise ConfigError(
            f"policy.parallel: context {parallel.context}, expert {parallel.expert}, expert_tensor {parallel.expert_tensor}: "
            f"context and expert parallelism are not available yet; leave them at their defaults"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError("policy.parallel.virtual_pipeline: needs pipeline > 1; set it to 1")
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("policy.parallel.sequence: sequence parallelism needs tensor > 1; set it to false")


def init_process_group(device: torch.device, *, timeout_s: float) -> bool:
    """Join a process group of one rank if none exists. Returns whether it was made here (and is ours to destroy)."""
    if dist.is_initialized():
        return False
    backend = "nccl" if device.type == "cuda" else "gloo"
    # A HashStore needs no port, so two runs on one machine cannot meet.
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    return True


def init_parallel(parallel: ParallelConfig, *, timeout_s: float, seed: int) -> ParallelState:
    """Create Megatron's process groups over the initialised world. Collective; call inside `megatron_device`."""
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,     # type: ignore[arg-type]  # it makes a timedelta of it
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ParallelState.from_mpu(mpu, timeout_s=timeout_s)


def destroy_parallel() -> None:
    """Tear Megatron's groups down, so that another layout can be set up in the same processes."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
