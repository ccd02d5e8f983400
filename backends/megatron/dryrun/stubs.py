"""The stubs of a dry run for peers, weights and CUDA, in one context manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, UntypedStorage
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from backends.megatron.checks.layout import layers_of_stages
from backends.megatron.convert.adapters import LAYER_NUMBER
from backends.megatron.convert.table import Entry
from backends.megatron.cpu.kernels import assuming_kernels
from backends.megatron.cpu.shim import megatron_device, replaced
from backends.megatron.dryrun.mode import META, FunctionsOfCuda, MetaFloats
from backends.megatron.dryrun.usage import Usage
from backends.megatron.training import offload
from backends.megatron.training.offload import OffloadedTensors
from backends.megatron.weights import export
from backends.megatron.weights.export import WeightExporter, _Coordinates
from backends.megatron.weights.tensors import Source, sources_of
from rlcore.algorithms import types
from rlcore.config.sections.policy import ParallelConfig
from rlcore.planning.memory import padded_vocab_size

# Memory that a dry run cannot know and does not count.
LEFT_OUT = (
    "CUDA's context, workspaces of kernels, NCCL's buffers, fragments of the allocator",
    "Transformer Engine's layers: these are Megatron's own",
    "the sizes that other ranks send: every rank is taken to be like this one",
    "what the ranks agree on when they write a checkpoint, and the writing",
)


@dataclass(frozen=True)
class Peers:
    """The ranks of the world, in Megatron's order "tp-cp-ep-dp-pp", and their answers."""

    parallel: ParallelConfig
    world: int
    vocab_divisible_by: int = 1

    @property
    def of_a_stage(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.world // self.parallel.pipeline

    def coordinates(self) -> list[tuple[int, int]]:
        """(data-parallel index, stage) of every rank."""
        shards = self.parallel.tensor * self.parallel.context
        return [
            (rank % self.of_a_stage // shards, rank // self.of_a_stage)
            for rank in range(self.world)
        ]

    def of_exporter(self) -> list[_Coordinates]:
        """The coordinates that a `WeightExporter` gathers."""
        p = self.parallel
        expert_tensor = p.expert_tensor or p.tensor
        found = []
        for rank in range(self.world):
            own = rank % self.of_a_stage
            found.append(
                _Coordinates(
                    tp=own % p.tensor,
                    stage=rank // self.of_a_stage,
                    replica=own // p.tensor,
                    etp=own % expert_tensor,
                    ep=own // expert_tensor % p.expert,
                    expert_replica=own // (expert_tensor * p.expert),
                )
            )
        return found

    def padded_vocab(self, exporter: Any) -> int:
        """The rows of the padded vocabulary, which real stages agree on by communication."""
        return padded_vocab_size(
            exporter.arch.vocab_size, self.vocab_divisible_by, self.parallel.tensor
        )

    def sources(self, exporter: Any) -> dict[str, Source]:
        """The pipeline stage that owns each tensor."""
        stages = self._stages_of_layers(exporter.arch.num_layers)

        def stage_of(entry: Entry) -> int:
            layer = LAYER_NUMBER.search(entry.megatron)
            if layer is not None:
                return stages[int(layer[1])]
            return 0 if entry.megatron.startswith("embedding.") else self.parallel.pipeline - 1

        entries: list[Entry] = exporter._exported.entries
        return sources_of((entry, stage_of(entry)) for entry in entries)

    def _stages_of_layers(self, layers: int) -> list[int]:
        chunks = self.parallel.virtual_pipeline
        each = layers_of_stages(layers, self.parallel)
        return [
            stage
            for _ in range(chunks)
            for stage, count in enumerate(each)
            for _ in range(count // chunks)
        ]


@contextmanager
def without_peers(usage: Usage, peers: Peers, rank: int, *, skew: float) -> Iterator[None]:
    """Inside, this process is one rank of many, and floating-point tensors have no memory.

    Args:
        skew: the share of tokens for this rank's experts, as a multiple of the even share.
    """
    devices = dist.Backend.backend_capability["fake"]
    devices.append(META.type)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=peers.world)
    try:
        with ExitStack() as stack:
            for owner, name, stub in _replacements(usage, peers, skew):
                stack.enter_context(replaced(owner, name, stub))
            stack.enter_context(assuming_kernels("cuda"))
            stack.enter_context(megatron_device(META))
            stack.enter_context(FunctionsOfCuda(usage))
            stack.enter_context(MetaFloats(usage))
            yield
    finally:
        dist.destroy_process_group()
        devices.remove(META.type)


def _replacements(usage: Usage, peers: Peers, skew: float) -> list[tuple[Any, str, Any]]:
    """List (owner, attribute, stub)."""
    return [
        (dist, "new_group", _fake_group(dist.new_group)),
        (MoELayer, "route", _routed(MoELayer.route, skew)),
        # Megatron keeps this tensor in the class, where a later run would find it without memory.
        (MoEAuxLossAutoScaler, "main_loss_backward_scale", None),
        (OffloadedTensors, "_bring", _measured(OffloadedTensors._bring, usage)),
        (OffloadedTensors, "_send_away", _measured(OffloadedTensors._send_away, usage)),
        # These answer without communication.
        (WeightExporter, "_gather_coordinates", lambda exporter: peers.of_exporter()),
        (WeightExporter, "_agree_on_vocab", lambda exporter, rows: peers.padded_vocab(exporter)),
        (WeightExporter, "_find_sources", lambda exporter: peers.sources(exporter)),
        (F, "scaled_dot_product_attention", _efficient_attention),
        # The check compares devices, and integers are on another device than floats here.
        (types, "_check_record", lambda record, **sizes: None),
        # A copy to the host or back would read the contents of a storage.
        (offload, "_as_bytes", lambda storage, device: _bytes_like(storage)),
        # The modes are active in this thread alone.
        (export, "prefetched", lambda make, items, device: map(make, items)),
    ]


def _fake_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Make every group a fake group, including Megatron's gloo groups."""

    def call(ranks: Any = None, *args: Any, group_desc: Any = None, **options: Any) -> Any:
        return new_group(ranks, backend="fake", group_desc=group_desc)

    return call


def _routed(route: Callable[..., Any], skew: float) -> Callable[..., Any]:
    """Let the router compute, but return a choice with values."""

    def call(layer: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        probs, chosen = route(layer, *args, **options)
        first = layer.local_expert_indices[0]
        own = range(first, first + len(layer.local_expert_indices))
        tokens, experts = chosen.shape
        with _disable_current_modes():
            choice = assumed_choice(tokens, experts, layer.config.moe_router_topk, own, skew)
        return probs, choice.clone()

    return call


@lru_cache(maxsize=8)
def assumed_choice(tokens: int, experts: int, topk: int, own: range, skew: float) -> Tensor:
    """Return a choice of `topk` different experts a token: bool [tokens, experts].

    Each expert in `own` gets `skew` times the even share of the tokens; the others share the rest
    evenly. This is systematic sampling: the shares are laid end to end, and a token with offset u
    takes the experts at u, u + 1, ...; no share is longer than 1, so these experts differ.
    """
    even = topk / experts
    shares = torch.full((experts,), even, dtype=torch.float64)
    if skew != 1 and len(own) < experts:
        shares[own.start : own.stop] = skew * even
        shares[shares == even] = (topk - skew * even * len(own)) / (experts - len(own))
    ends = shares.cumsum(0)
    # Spread the offsets over the tokens, so that all sequences and slices of the pack are alike.
    starts = (torch.arange(tokens, dtype=torch.float64) * 0.6180339887498949) % 1
    starts = (starts.argsort().argsort() + 0.5) / tokens
    points = starts[:, None] + torch.arange(topk)
    chosen = torch.searchsorted(ends, points.clamp(max=float(ends[-1]) - 1e-9), right=True)
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, is_causal: bool,
    scale: float, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Call CUDA's kernel for single precision; torch chooses another for meta tensors."""
    if enable_gqa:
        raise ValueError("the kernel needs as many heads of keys as of queries")
    # torch turns the mask into a bias with a row for each head.
    if attn_mask is not None:
        sizes = (*query.shape[:3], key.size(2))
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype, device=META).expand(sizes)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    out = attend(query, key, value, attn_mask, True, 0.0, is_causal, scale=scale)
    return cast(Tensor, out[0])


def _bytes_like(storage: UntypedStorage) -> Tensor:
    with _disable_current_modes():
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device=META)


def _measured(move: Callable[..., None], usage: Usage) -> Callable[..., None]:
    """Measure sizes again after storages are resized: the modes do not see a resize."""

    def call(tensors: OffloadedTensors, storages: Iterable[UntypedStorage]) -> None:
        # New tensors are copies on the host, or the bytes of a storage.
        with usage.on_host():
            move(tensors, storages)
        usage.measure_again()

    return call
