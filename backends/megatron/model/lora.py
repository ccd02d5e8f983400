"""Low-rank adapters (LoRA; Hu et al. 2021) on Megatron's parallel linear layers.

An adapter adds `scale * B A x` to the product of a frozen weight. As in PEFT and in SGLang each
Hugging Face matrix has factors of its own, also where Megatron fuses several matrices into a layer
(q, k, v; gate, up). What tensor-parallel ranks hold and send, for a fused layer of n matrices:

    layer             A                     B                       sent
    column-parallel   [r, in], whole        [out / tp, r], rows     [tokens, n r]
    row-parallel      [r, in / tp], columns [out, r], whole         [tokens, r]

A factor that every rank holds whole sees only the rank's tokens under sequence parallelism; the
mark `sequence_parallel` makes Megatron sum its gradient. Experts exchange tokens outside their
layers, which never communicate: where tensor parallelism splits an expert, the whole factor's
gradient is summed over its ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from backends.megatron.convert.adapters import Adapted, adapted_layers
from backends.megatron.convert.architecture import Architecture, part_shapes
from backends.megatron.convert.layout import owned_parameters, tp_slice, unpack, unwrap
from backends.megatron.convert.table import Split
from rlcore.config.sections.policy import LoraConfig


class Factors(nn.Module):
    """A and B of one Hugging Face matrix, or this rank's part of them.

    Args:
        name: the matrix in the Hugging Face folder, without `.weight`.
        shape: this rank's part of the matrix, [out, in].
    """

    def __init__(self, name: str, rank: int, shape: tuple[int, int], weight: Tensor) -> None:
        super().__init__()
        self.name = name
        kind: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.a = nn.Parameter(torch.zeros(rank, shape[1], **kind))
        self.b = nn.Parameter(torch.zeros(shape[0], rank, **kind))


class Adapter(nn.Module):
    """The factors of one layer, and what the layer's forward pass adds.

    Args:
        part_rows: this rank's rows of every part of the layer's weight, adapted or not.
        group_rows: the size of `Entry.group`.
    """

    def __init__(
        self, layer: Any, adapted: Adapted, part_rows: Sequence[int], group_rows: int, scale: float
    ) -> None:
        super().__init__()
        self.entry = adapted.entry
        self.scale = scale
        self.part_rows = list(part_rows)
        self.group_rows = group_rows
        # Of every matrix, all its parts together.
        self.rows = [
            sum(part_rows[k] for k in parts) for parts in map(self.parts, self.entry.names)
        ]
        self.by_column = isinstance(layer, ColumnParallelLinear)
        self.group: ProcessGroup = layer.tp_group
        # Experts exchange tokens themselves.
        self.silent: bool = layer.explicit_expert_comm
        self.sequence_parallel: bool = layer.sequence_parallel and not self.silent
        weight: Tensor = layer.weight
        # Index of the matrix in the layer -> its factors.
        self.pieces = nn.ModuleDict()
        for index, name in adapted.modules.items():
            shape = (self.rows[index], weight.size(1))
            self.pieces[str(index)] = Factors(name, adapted.rank, shape, weight)
        for factors in self.factors():
            cut, whole = (factors.b, factors.a) if self.by_column else (factors.a, factors.b)
            set_tensor_model_parallel_attributes(cut, True, 0 if self.by_column else 1, 1)
            # By this mark the gradient norm counts a whole factor on one rank of its own group.
            # Without it the norm would leave out the experts of all but the first rank of TP.
            set_tensor_model_parallel_attributes(whole, self.group.rank() == 0, -1, 1)
            whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            for factor in (cut, whole):
                # By this mark Megatron tells the parameters of experts.
                factor.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]

    def parts(self, name: str) -> list[int]:
        """The indices of the parts of a matrix, by its tensor's name."""
        return [k for k, part in enumerate(self.entry.parts) if part.name == name]

    def factors(self) -> Iterator[Factors]:
        """The factors of the adapted matrices."""
        for factors in self.pieces.values():
            assert isinstance(factors, Factors)
            yield factors

    def forward(self, x: Tensor) -> Tensor:
        """The layer's input, as the layer gets it -> what to add to its output."""
        pairs = [self.pair(factors) for factors in self.factors()]
        low = F.linear(x, torch.cat([a for a, _ in pairs]) if len(pairs) > 1 else pairs[0][0])
        if not self.silent and self.group.size() > 1:
            low = self._over_ranks(low)
        return F.linear(low * self.scale, self.joined([b for _, b in pairs]))

    def pair(self, factors: Factors) -> tuple[Tensor, Tensor]:
        """A and B; each rank of a split expert has a part of the whole factor's gradient."""
        a: Tensor = factors.a
        b: Tensor = factors.b
        if self.silent and self.group.size() > 1:
            if self.by_column:
                a = copy_to_tensor_model_parallel_region(a, group=self.group)
            else:
                b = copy_to_tensor_model_parallel_region(b, group=self.group)
        return a, b

    def _over_ranks(self, low: Tensor) -> Tensor:
        if self.by_column:
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(
                    low, tensor_parallel_output_grad=True, group=self.group
                )
            return copy_to_tensor_model_parallel_region(low, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return reduce_from_tensor_model_parallel_region(low, group=self.group)

    def joined(self, found: Sequence[Tensor]) -> Tensor:
        """The Bs [rows, r] of the adapted matrices as one, with the rows of the layer's weight.

        Each has columns of its own, for its part of the low-rank product.
        """
        if len(self.rows) == 1:
            return found[0]
        rank = found[0].size(1)
        blocks = []
        place = dict(zip(map(int, self.pieces), range(len(found))))
        for index, rows in enumerate(self.rows):
            if index not in place:
                blocks.append(found[0].new_zeros(rows, rank * len(found)))
                continue
            before = rank * place[index]
            after = rank * (len(found) - place[index] - 1)
            blocks.append(F.pad(found[place[index]], (before, after)))
        if self.entry.split is not Split.QKV:
            return torch.cat(blocks)
        # Rows of q, k and v alternate group by group; a rank may have part of one group.
        groups = max(self.part_rows[1] // self.group_rows, 1)
        by_group = [block.view(groups, -1, block.size(1)) for block in blocks]
        return torch.cat(by_group, dim=1).flatten(0, 1)


class _WithAdapter:
    """Mixed into a layer whose class is swapped: its parameters keep their names."""

    lora: Adapter

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the layer and its adapter."""
        out, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        added = self.lora(input_)
        # In place where nothing is recorded: a scoring pass holds little else than such outputs.
        return out + added if torch.is_grad_enabled() else out.add_(added), bias


class AdaptedColumn(_WithAdapter, ColumnParallelLinear):
    """A column-parallel layer with an adapter."""


class AdaptedRow(_WithAdapter, RowParallelLinear):
    """A row-parallel layer with an adapter."""


def attach(
    chunks: Sequence[nn.Module], arch: Architecture, config: LoraConfig, *, seed: int
) -> None:
    """Give every targeted layer an adapter, and freeze everything else but a value head.

    The model computes what it did before: B is 0. A has the distribution of PEFT's default, with
    the same numbers under every layout.

    Raises ConfigError if a target names no matrix of the model.
    """
    adapted = adapted_layers(arch, config)
    for chunk in chunks:
        model: Any = unwrap(chunk)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("value_head."))
        if model.pre_process:
            # Recomputation is an autograd function of the hidden states: behind a frozen embedding
            # these need no gradient, and then no adapter in the layer would get one.
            model.embedding.register_forward_hook(_with_gradient)
        layers = {
            id(module.weight): module
            for module in model.modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        }
        for entry, weight, _ in list(owned_parameters([model], arch)):
            if entry.megatron in adapted:
                _attach(layers[id(weight)], adapted[entry.megatron], arch, config, seed)


def _with_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _attach(
    layer: Any, adapted: Adapted, arch: Architecture, config: LoraConfig, seed: int
) -> None:
    entry = adapted.entry
    size: int = layer.tp_group.size()
    rank: int = layer.tp_group.rank()
    shapes = part_shapes(arch, entry)
    parts = [tp_slice(entry.split, shape, rank, size, 0) for shape in shapes]
    rows = [part.shape(shape)[0] for part, shape in zip(parts, shapes)]
    group_rows = arch.sizes[entry.group]
    layer.lora = Adapter(layer, adapted, rows, group_rows, config.alpha / adapted.rank)
    layer.__class__ = AdaptedColumn if layer.lora.by_column else AdaptedRow
    for factors in layer.lora.factors():
        whole = _initial(factors, shapes[0][1], seed)
        with torch.no_grad():
            factors.a.copy_(whole if layer.lora.by_column else parts[0].of(whole))


def _initial(factors: Factors, width: int, seed: int) -> Tensor:
    """A whole A: uniform up to 1 / sqrt(in), drawn from the matrix' name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{factors.name}".encode()))
    drawn = torch.empty(factors.a.size(0), width).uniform_(-1, 1, generator=generator)
    return drawn / math.sqrt(width)


def adapters(chunks: Sequence[nn.Module]) -> Iterator[Adapter]:
    """The adapter of each layer that has one."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


def grouped(
    found: Sequence[Adapter], x: Tensor, linear: Callable[[Tensor, Sequence[Tensor]], Tensor]
) -> Tensor:
    """What the adapters of one layer of all experts of a rank add to its output.

    Args:
        x: rows sorted by expert.
        linear: the product of such rows with a weight of each expert.
    """
    pairs = [[adapter.pair(factors) for factors in adapter.factors()] for adapter in found]
    low = linear(x, [torch.cat([a for a, _ in own]) for own in pairs]) * found[0].scale
    joined = [adapter.joined([b for _, b in own]) for adapter, own in zip(found, pairs)]
    return linear(low, joined)


@torch.no_grad()
def delta(adapter: Adapter, index: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """What an adapter adds to this rank's piece of a part of its layer's weight.

    Returns None for a part without factors.
    """
    entry = adapter.entry
    name = entry.parts[index].name
    matrix = str(entry.names.index(name))
    if matrix not in adapter.pieces:
        return None
    factors: Any = adapter.pieces[matrix]
    own = adapter.parts(name)
    b = factors.b
    if len(own) > 1:
        pieces = unpack(entry.split, b, adapter.group_rows, [adapter.part_rows[k] for k in own])
        b = pieces[own.index(index)].flatten(0, -2)
    return adapter.scale * (b.to(dtype) @ factors.a.to(dtype))


def named_factors(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """A and B of every adapted matrix on this rank, by `<matrix>.lora_A.weight` and `lora_B`."""
    found: dict[str, Tensor] = {}
    for adapter in adapters(chunks):
        for factors in adapter.factors():
            found[f"{factors.name}.lora_A.weight"] = factors.a
            found[f"{factors.name}.lora_B.weight"] = factors.b
    return found
