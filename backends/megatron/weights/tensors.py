"""What an export gathers: a model's weights, or the factors of its adapters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backends.megatron.convert.adapters import factor_rows
from backends.megatron.convert.architecture import Architecture, model_entries
from backends.megatron.convert.layout import Piece, owned_parameters, weight_specs
from backends.megatron.convert.table import Entry, Split
from backends.megatron.model.lora import Adapter, adapters, delta, named_factors
from rlcore.config.sections.policy import LoraConfig
from rlcore.weights import TensorSpec


@dataclass(frozen=True)
class Exported:
    """The tensors of an export, in its order, and what this rank holds of them."""

    entries: list[Entry]
    specs: list[TensorSpec]
    held: dict[str, Tensor]  # this rank's parameter of an entry, by Megatron's name
    adapters: dict[str, Adapter]  # what is merged into a parameter

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return {spec.name: spec.shape for spec in self.specs}

    @property
    def vocabulary_rows(self) -> int:
        """This rank's rows of a tensor that is split along the vocabulary, or 0."""
        found = [e for e in self.entries if e.split is Split.VOCAB and e.megatron in self.held]
        return self.held[found[0].megatron].size(0) if found else 0

    def merged(self, entry: Entry, index: int, piece: Tensor) -> Tensor:
        """This rank's part of a matrix with its adapter's product, in fp32; no weight changes."""
        adapter = self.adapters.get(entry.megatron)
        added = None if adapter is None else delta(adapter, index)
        return piece if added is None else added.view(piece.shape).add_(piece)


@dataclass(frozen=True)
class Source:
    """The origin of one Hugging Face tensor; all ranks agree on it."""

    # Entries, and the indices of the tensor's parts among those of the entry.
    parts: tuple[tuple[Entry, int], ...]
    stage: int  # pipeline stage that owns it


@dataclass(frozen=True)
class SentPart:
    """The contribution of one rank to one tensor of a bucket, or to a part of it."""

    spec: TensorSpec
    entry: Entry
    index: int  # of the part among its entry's
    piece: Piece

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from a rank's other contributions."""
        return self.entry.megatron, self.index

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.piece.shape

    @property
    def num_bytes(self) -> int:
        """Its size in the bucket."""
        return math.prod(self.shape) * self.spec.torch_dtype.itemsize


def sources_of(stages: Iterable[tuple[Entry, int]]) -> dict[str, Source]:
    """The source of each tensor, from the pipeline stage of each entry."""
    parts: dict[str, list[tuple[Entry, int]]] = {}
    stage_of: dict[str, int] = {}
    for entry, stage in stages:
        for index, part in enumerate(entry.parts):
            parts.setdefault(part.name, []).append((entry, index))
            stage_of[part.name] = stage
    return {name: Source(tuple(own), stage_of[name]) for name, own in parts.items()}


def exported(
    chunks: Sequence[nn.Module],
    arch: Architecture,
    dtype: torch.dtype,
    head: str,
    lora: LoraConfig | None = None,
    *,
    merged: bool = True,
) -> Exported:
    """The weights under the names of a Hugging Face folder, `merged` with any adapters.

    With `lora` the adapters' factors instead, under PEFT's names: `...q_proj.lora_A.weight`.
    """
    if lora is not None:
        rows = factor_rows(arch, lora)
        name = str(dtype).removeprefix("torch.")
        specs = [TensorSpec(entry.parts[0].name, shape, name) for entry, shape in rows]
        return Exported([entry for entry, _ in rows], specs, named_factors(chunks), {})
    owned = owned_parameters(chunks, arch)
    held = {entry.megatron: param for entry, param, copy in owned if not copy}
    merging = {one.entry.megatron: one for one in adapters(chunks)} if merged else {}
    return Exported(model_entries(arch, head), weight_specs(arch, dtype, head), held, merging)
