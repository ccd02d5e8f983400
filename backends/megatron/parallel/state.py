"""The layout of the ranks: sizes, coordinates and process groups.

Only `ParallelState.from_mpu` asks Megatron for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from backends.megatron.cpu.shim import replaced
from rlcore.config.sections.policy import ParallelConfig
from rlcore.stores import few_store_requests

# Our name of a group -> the function of mpu that returns the group, and its arguments.
_MPU_GROUPS: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "dp_group": ("get_data_parallel_group", {}),
    "dp_cp_group": ("get_data_parallel_group", {"with_context_parallel": True}),
}


class CPRank(NamedTuple):
    """One rank among the context-parallel ranks, which share the sequences of a pack."""

    size: int = 1
    rank: int = 0

    @property
    def chunks(self) -> int:
        """The number of chunks of a sequence; lengths are padded to a multiple of this number."""
        return 1 if self.size == 1 else 2 * self.size

    @property
    def own_chunks(self) -> tuple[int, ...]:
        """The chunks of every sequence that this rank holds, in the order of its slots."""
        return (0,) if self.size == 1 else (self.rank, self.chunks - 1 - self.rank)


ALONE = CPRank()


class _Group:
    """Descriptor of a process group of a `ParallelState`, looked up by the attribute's name.

    Reading raises RuntimeError if the state has no such group.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, state: ParallelState, owner: type) -> ProcessGroup:
        if self.name not in state.groups:
            why = "torch.distributed was not initialised when it was made"
            if state.is_distributed:
                why = (
                    f"mpu.{_MPU_GROUPS[self.name][0]} is missing, or returned no ProcessGroup of"
                    " torch"
                )
            raise RuntimeError(
                f"this ParallelState has no {self.name}: {why}, as is usual where mpu is a stub"
            )
        return state.groups[self.name]


@dataclass(frozen=True)
class ParallelState:
    """The coordinates of this rank in the layout, and its process groups.

    `tp`, `pp`, `dp`, `cp`, `ep` are tensor, pipeline, data, context and expert parallelism. A
    replica is the set of ranks that hold one copy of the model and work on the same sequences; they
    share a data-parallel index. Without torch.distributed, as in unit tests, a state has no groups.
    """

    rank: int
    world_size: int
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    dp_size: int  # without context parallelism
    dp_rank: int
    cp_size: int
    cp_rank: int
    ep_size: int
    ep_rank: int
    etp_size: int  # tensor parallelism inside an expert
    etp_rank: int
    edp_rank: int  # among the ranks that hold the same experts
    vpp_size: int  # model chunks of this rank
    replica_leaders: tuple[int, ...]  # [dp_size] global rank of the first rank of each replica
    # [dp_size] global rank of one rank of each replica's last stage
    score_sources: tuple[int, ...]
    timeout_s: float = field(default=600.0, compare=False)  # for a collective
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict, compare=False, repr=False)

    dp_group = _Group()
    dp_cp_group = _Group()
    # All ranks, for tensors on the CPU: batches, vectors and decisions, also in runs on CUDA.
    control_group = _Group()
    # The ranks of this replica, for tensors on the CPU.
    replica_group = _Group()

    @property
    def cp(self) -> CPRank:
        """This rank among the ranks that share the packs of a replica."""
        return CPRank(self.cp_size, self.cp_rank)

    @property
    def edp_size(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.world_size // (self.pp_size * self.ep_size * self.etp_size)

    def split_of(self, *, expert: bool) -> tuple[int, int]:
        """This rank and the number of ranks that split a weight, dense or of a routed expert."""
        return (self.etp_rank, self.etp_size) if expert else (self.tp_rank, self.tp_size)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage."""
        return self.pp_rank == self.pp_size - 1

    def describe(self, device: torch.device, *, sequence: bool) -> str:
        """Return the layout in words; `sequence` adds sequence parallelism."""
        tensor = f"TP {self.tp_size}{' + sequence parallel' if sequence else ''}"
        context = f" x CP {self.cp_size}" if self.cp_size > 1 else ""
        experts = f" x EP {self.ep_size}" if self.ep_size > 1 else ""
        layout = f"{tensor} x PP {self.pp_size} x DP {self.dp_size}{context}{experts}"
        return f"{layout} on {self.world_size} {device.type} ranks"

    @property
    def is_distributed(self) -> bool:
        """Whether this state has groups: torch.distributed was initialised when it was made."""
        return "control_group" in self.groups

    @classmethod
    def from_mpu(
        cls,
        mpu: Any,
        *,
        timeout_s: float = 600.0,
        coordinates: Sequence[tuple[int, int]] | None = None,
    ) -> ParallelState:
        """Read the layout from Megatron's `parallel_state`, or from a stub of it.

        If torch.distributed is initialised, this is collective: it makes the gloo groups that the
        default group cannot replace, with `timeout_s`. Otherwise nothing is communicated, and rank
        and world size follow from the answers, in Megatron's default order of ranks
        ("tp-cp-ep-dp-pp").

        A stub needs `get_{tensor_model,pipeline_model,data,context}_parallel_{world_size,rank}`.
        Other functions may be missing: a model without experts and without a virtual pipeline is
        assumed.

        Args:
            coordinates: (data-parallel index, stage) of every rank, if ranks cannot gather them.

        Raises:
            AttributeError: `mpu` lacks one of these functions.
            TypeError: a function returned something other than an int.
            ValueError: a rank lies outside its size, or the ranks contradict one another.
        """
        # Read everything before any communication: a stub without a function must not leave other
        # ranks waiting.
        layout = _ask_layout(mpu)
        pp_size = layout["pp_size"]
        pp_rank = layout["pp_rank"]
        dp_size = layout["dp_size"]
        dp_rank = layout["dp_rank"]
        groups: dict[str, ProcessGroup] = {}
        if dist.is_initialized():
            rank = dist.get_rank()
            groups["control_group"] = _control_group(timeout_s)
            if not coordinates:
                own = torch.tensor([dp_rank, pp_rank])
                gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                dist.all_gather(gathered, own, group=groups["control_group"])
                coordinates = [(int(index), int(stage)) for index, stage in gathered]
        else:
            shard = layout["cp_rank"] * layout["tp_size"] + layout["tp_rank"]
            shards = range(layout["cp_size"] * layout["tp_size"])
            rank = (pp_rank * dp_size + dp_rank) * len(shards) + shard
            coordinates = [(d, pp) for pp in range(pp_size) for d in range(dp_size) for _ in shards]
        replicas = _replicas(coordinates, dp_size, pp_size)
        if groups:
            made = [groups["control_group"]]
            if dp_size > 1:
                made = [_gloo_group(r, timeout_s, f"REPLICA_{d}") for d, r in enumerate(replicas)]
            groups["replica_group"] = made[dp_rank]
            # A stub may lack some or all of Megatron's groups.
            for name, (function, arguments) in _MPU_GROUPS.items():
                asked = getattr(mpu, function, None)
                group = asked(**arguments) if callable(asked) else None
                if isinstance(group, ProcessGroup):
                    groups[name] = group
        return cls(
            rank=rank,
            world_size=len(coordinates),
            **layout,
            replica_leaders=tuple(ranks[0] for ranks in replicas),
            score_sources=tuple(
                next(r for r in ranks if coordinates[r][1] == pp_size - 1) for ranks in replicas
            ),
            timeout_s=timeout_s,
            groups=groups,
        )


def _ask_layout(mpu: Any) -> dict[str, int]:
    """The fields of `ParallelState` that Megatron knows."""
    axes = {
        "tp": _ask_axis(mpu, "tensor_model_parallel"),
        "pp": _ask_axis(mpu, "pipeline_model_parallel"),
        "dp": _ask_axis(mpu, "data_parallel"),
        "cp": _ask_axis(mpu, "context_parallel"),
        "ep": _ask_axis(mpu, "expert_model_parallel", otherwise=(1, 0)),
    }
    axes["etp"] = _ask_axis(mpu, "expert_tensor_parallel", otherwise=axes["tp"])
    layout: dict[str, int] = {}
    for axis, (size, rank) in axes.items():
        layout[f"{axis}_size"] = size
        layout[f"{axis}_rank"] = rank
    edp_rank = (layout["dp_rank"] * layout["cp_size"] + layout["cp_rank"]) // layout["ep_size"]
    layout["edp_rank"] = _ask(mpu, "get_expert_data_parallel_rank", otherwise=edp_rank)
    layout["vpp_size"] = _ask(mpu, "get_virtual_pipeline_model_parallel_world_size", otherwise=1)
    return layout


def _ask(mpu: Any, function: str, *, otherwise: int | None = None) -> int:
    """Call `function` of `mpu`; without one that returns an int the answer is `otherwise`."""
    asked = getattr(mpu, function, None)
    answer = asked() if callable(asked) else None
    if isinstance(answer, int):
        return answer
    if otherwise is not None:
        return otherwise
    if not callable(asked):
        raise AttributeError(
            f"mpu has no function {function}; a stub of it needs one that returns an int"
        )
    raise TypeError(
        f"mpu.{function}() returned {answer!r}, expected an int: give the stub that answer"
    )


def _ask_axis(
    mpu: Any, axis: str, *, otherwise: tuple[int | None, int | None] = (None, None)
) -> tuple[int, int]:
    """Return (size, rank) of this process on one axis of the layout."""
    size = _ask(mpu, f"get_{axis}_world_size", otherwise=otherwise[0])
    rank = _ask(mpu, f"get_{axis}_rank", otherwise=otherwise[1])
    if not 0 <= rank < size:
        raise ValueError(
            f"mpu.get_{axis}_rank() is {rank}, expected 0 to {size - 1}, as get_{axis}_world_size()"
            f" is {size}"
        )
    return size, rank


def _control_group(timeout_s: float) -> ProcessGroup:
    """The default group if it has gloo for tensors on the CPU, or a gloo group of all ranks.

    A gloo group connects every pair of its ranks, so a second group of all ranks is made only if
    necessary.
    """
    default = dist.group.WORLD
    if default is not None and "cpu:gloo" in dist.get_backend_config(default):
        return default
    return _gloo_group(None, timeout_s, "CONTROL")


def _gloo_group(ranks: list[int] | None, timeout_s: float, name: str) -> ProcessGroup:
    """Create a gloo group of these ranks, or of all. Collective.

    All ranks take part. `use_local_synchronization` would not require the others, but it names a
    group by its ranks: a second group of the same ranks would find the addresses of the first.
    """
    timeout = timedelta(seconds=timeout_s)
    with few_store_requests():
        return dist.new_group(ranks, backend="gloo", timeout=timeout, group_desc=name)


def _replicas(
    coordinates: Sequence[tuple[int, int]], dp_size: int, pp_size: int
) -> list[list[int]]:
    """The global ranks of each replica, given (data-parallel index, stage) of every rank."""
    for d in range(dp_size):
        if (d, pp_size - 1) not in coordinates:
            raise ValueError(
                f"no rank of {len(coordinates)} is the last of {pp_size} pipeline stages of"
                f" data-parallel rank {d} of {dp_size}; (data-parallel rank, stage) by rank:"
                f" {coordinates}. Give each process a stub of mpu with ranks of its own"
            )
    return [
        [rank for rank, (index, _) in enumerate(coordinates) if index == d] for d in range(dp_size)
    ]


def init_process_group(device: torch.device, *, timeout_s: float) -> bool:
    """Create a process group of one rank if none exists; return whether it was created here."""
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # A HashStore needs no port, so two runs on one machine cannot connect.
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s)
    )
    return True


def init_parallel(
    parallel: ParallelConfig,
    *,
    timeout_s: float,
    seed: int,
    coordinates: Sequence[tuple[int, int]] | None = None,
) -> ParallelState:
    """Create Megatron's process groups over the initialised world.

    Collective; call inside `megatron_device`. `coordinates` are those of `from_mpu`.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    with _groups_of_gpus():
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=(
                parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
            ),
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            # Only Megatron's gathered checkpoints, which `checkpoint.optimizer_state` replaces, use
            # these groups.
            create_gloo_process_groups=False,
            # Megatron passes this to timedelta, which accepts a float.
            distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ParallelState.from_mpu(mpu, timeout_s=timeout_s, coordinates=coordinates)


def connect_groups(
    device: torch.device, *, moe: bool, tied: bool, distributed: bool
) -> dict[str, int]:
    """Use every group of a training step once, and return their sizes by name. Collective.

    NCCL makes a communicator, of a hundred MiB to a GiB, at a group's first use. An engine on the
    same GPU has to see that memory gone before it measures how much is free.

    Args:
        moe: the model has experts.
        tied: embedding and head are one weight.
        distributed: the optimizer's state is divided.
    """
    from megatron.core import parallel_state as mpu

    groups = {
        "tensor": mpu.get_tensor_model_parallel_group(),
        "pipeline": mpu.get_pipeline_model_parallel_group(),
        "context": mpu.get_context_parallel_group(),
        "data and context": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    if tied and mpu.get_pipeline_model_parallel_world_size() > 1:
        # None on the stages between the first and the last.
        groups["embeddings"] = mpu.get_embedding_group(check_initialized=False)
    if moe:
        groups["expert"] = mpu.get_expert_model_parallel_group()
        groups["expert tensor"] = mpu.get_expert_tensor_parallel_group()
        groups["expert and its tensor"] = mpu.get_expert_tensor_and_model_parallel_group()
        groups["expert data"] = mpu.get_expert_data_parallel_group()
    if distributed:
        groups["whole optimizer"] = mpu.get_intra_distributed_optimizer_instance_group()
    else:
        groups["model"] = mpu.get_model_parallel_group()
    if moe and not distributed:
        groups["model with experts"] = mpu.get_expert_tensor_model_pipeline_parallel_group()
    used = {name: group for name, group in groups.items() if group is not None and group.size() > 1}
    for name, group in used.items():
        dist.all_reduce(torch.ones(1, device=device), group=group)
        if name == "expert":
            given = torch.ones(group.size(), device=device)
            dist.all_to_all_single(torch.empty_like(given), given, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {name: group.size() for name, group in used.items()}


@contextmanager
def _groups_of_gpus() -> Iterator[None]:
    """Inside, new groups on CUDA use NCCL alone, instead of the default group's NCCL and gloo.

    Megatron makes dozens of groups without naming a backend. It sends no CPU tensors in them: its
    own training script uses NCCL alone.
    """
    if "cuda:nccl" not in dist.get_backend_config(dist.group.WORLD):
        yield
        return
    new_group = dist.new_group

    def of_gpus(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": options.get("backend") or "nccl"})

    with replaced(dist, "new_group", of_gpus):
        yield


def destroy_parallel() -> None:
    """Destroy Megatron's groups, so that another layout can be set up in the same processes."""
    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
