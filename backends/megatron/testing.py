"""Stubs for tests of plugins on a CPU: of `megatron.core.mpu`, a configuration, a batch.

Nothing here needs Megatron, a process group or a GPU:

    mpu = stub_mpu(tensor=2, pipeline=2, data=4, rank=9)
    config = stub_config("algorithm.estimator.name=ppo", "algorithm.kl.reward_coef=0.1")
    batch = stub_batch([3, 0, 2], rewards=[1, 0, 0.5], logprobs=..., ref_logprobs=..., values=...)
    compute_advantages_and_returns(batch, config, ParallelState.from_mpu(mpu))
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.config import Config
from rlcore.config.load import load_config
from rlcore.data.batch import RolloutBatch

_REQUIRED_KEYS = ("run.name=stub", "model.path=stub", "data.paths=stub", "training.steps=1")
_INTEGERS = frozenset({"group_ids", "rollout_ids", "sequence_ids", "versions"})


@dataclass(frozen=True)
class StubMpu:
    """The functions of `megatron.core.mpu` that `ParallelState.from_mpu` calls, for one rank.

    Create it by `stub_mpu`. Ranks are in Megatron's default order "tp-cp-ep-dp-pp": tensor
    parallelism runs fastest, the pipeline slowest.
    """

    rank: int
    tensor: int
    pipeline: int
    data: int
    context: int
    expert: int
    virtual_pipeline: int | None

    @property
    def world_size(self) -> int:
        """The number of ranks of the layout."""
        return self.tensor * self.context * self.data * self.pipeline

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return self.rank % self.tensor

    def get_context_parallel_world_size(self) -> int:
        return self.context

    def get_context_parallel_rank(self) -> int:
        return self.rank // self.tensor % self.context

    def get_data_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        return self.data * (self.context if with_context_parallel else 1)

    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int:
        shards = self.tensor * (1 if with_context_parallel else self.context)
        return self.rank // shards % self.get_data_parallel_world_size(with_context_parallel)

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.pipeline

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.rank // (self.world_size // self.pipeline)

    def get_virtual_pipeline_model_parallel_world_size(self) -> int | None:
        return self.virtual_pipeline

    def get_expert_model_parallel_world_size(self) -> int:
        return self.expert

    def get_expert_model_parallel_rank(self) -> int:
        return self.rank // self.tensor % self.expert


def stub_mpu(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    context: int = 1,
    expert: int = 1,
    virtual_pipeline: int | None = None,
    rank: int | None = None,
) -> StubMpu:
    """Make a stub of `megatron.core.mpu` for rank `rank` of this layout.

    Args:
        expert: number of ranks of `data` x `context` with different experts, which are also split
            over tensor parallelism.
        virtual_pipeline: model chunks of a rank; None without an interleaved schedule.
        rank: by default this process's rank in torch.distributed, or 0 without it.

    Raises ValueError for a size below 1, an `expert` that does not divide data x context, and a
    rank outside the world.
    """
    sizes = {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
        "context": context,
        "expert": expert,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"stub_mpu: {name}: got {size}, expected at least 1")
    if data * context % expert:
        raise ValueError(
            f"stub_mpu: expert: {expert} does not divide data {data} x context {context}"
        )
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    stub = StubMpu(rank=rank, virtual_pipeline=virtual_pipeline, **sizes)
    if not 0 <= rank < stub.world_size:
        raise ValueError(
            f"stub_mpu: rank: got {rank}, expected 0 to {stub.world_size - 1}: the layout has"
            f" {stub.world_size}"
        )
    return stub


@contextmanager
def stub_megatron(mpu: Any, *, replace: bool = False) -> Iterator[Any]:
    """Inside, `from megatron.core import mpu` gives this stub, and `parallel_state` too.

    Yields the stub; a pytest fixture is a function that yields inside the context. Any other import
    from Megatron fails, as if it were not installed.

    Args:
        replace: set an imported Megatron aside until the context ends. Modules that imported parts
            of Megatron keep them.

    Raises RuntimeError if Megatron is already imported and `replace` is not set.
    """
    real = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"
    }
    if "megatron.core" in real and not replace:
        raise RuntimeError(
            "stub_megatron: megatron.core is imported already, by this test or one before it in the"
            " process; pass replace=True to put it aside"
        )
    megatron = ModuleType("megatron")
    core = ModuleType("megatron.core")
    megatron.core = core  # type: ignore[attr-defined]
    core.mpu = core.parallel_state = mpu  # type: ignore[attr-defined]
    stubs: dict[str, Any] = {
        "megatron": megatron,
        "megatron.core": core,
        "megatron.core.parallel_state": mpu,
    }
    for name in real:
        del sys.modules[name]
    sys.modules.update(stubs)
    try:
        yield mpu
    finally:
        for name in stubs:
            sys.modules.pop(name, None)
        sys.modules.update(real)


def stub_config(*overrides: str) -> Config:
    """Load a configuration from the keys of a test: `stub_config("algorithm.estimator.name=ppo")`.

    The syntax and the checks are those of the command line. Raises ConfigError.
    """
    return load_config([], [*_REQUIRED_KEYS, *overrides]).config


def stub_batch(lengths: Sequence[int], **vectors: Tensor | Sequence[float]) -> RolloutBatch:
    """Make a batch of sequences with these numbers of trainable tokens and no prompts.

    Args:
        lengths: B numbers; 0 is a sequence without trainable tokens.
        vectors: by name as in `EstimatorInputs`, [B] or [M = sum(lengths)], tensors or numbers.
            `rewards` default to 0, and `group_ids` to a single group.

    Raises ValueError for a vector of another length.
    """
    given: Mapping[str, Any] = {
        "rewards": [0.0] * len(lengths),
        "group_ids": [0] * len(lengths),
        **vectors,
    }
    num_tokens = sum(lengths)
    return RolloutBatch(
        tokens=torch.zeros(num_tokens, dtype=torch.int32),
        cu_tokens=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        vectors={
            name: value
            if isinstance(value, Tensor)
            else torch.tensor(value, dtype=torch.int64 if name in _INTEGERS else torch.float32)
            for name, value in given.items()
        },
    )
