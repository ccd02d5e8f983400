"""The parameters of a built model, and the Hugging Face tensors that they are made of.

Both directions are views and copies of the same elements, so a round trip is bit-exact. A piece is
the rank's slice of a part of a Hugging Face tensor:

    load     pieces                        -> `pack`   -> the rank's Megatron parameter
    export   the rank's Megatron parameter -> `unpack` -> pieces, as views
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backends.megatron.convert.architecture import Architecture, weight_tensors
from backends.megatron.convert.table import (
    MTP,
    MTP_LAYER,
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    Entry,
    Split,
    local_spelling,
)
from rlcore.weights import TensorSpec, saved_buffers

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")


@dataclass(frozen=True)
class Slice:
    """The part of a full tensor on one rank: `start : start + length` along `dim` (None: all)."""

    dim: int | None
    start: int = 0
    length: int = 0

    def of(self, full: Tensor) -> Tensor:
        """The part of `full`, a view."""
        return full if self.dim is None else full.narrow(self.dim, self.start, self.length)

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a tensor of shape `full`."""
        return full if self.dim is None else (*full[: self.dim], self.length, *full[self.dim + 1 :])


@dataclass(frozen=True)
class Piece:
    """A rank's slice of a part of a tensor, and where the part lies in the tensor."""

    split: Slice  # of the part
    shape: tuple[int, ...]  # of the split
    rows: slice | None = None  # of the part in the tensor; None: all
    transposed: bool = False
    expert: int | None = None  # index in a tensor of all experts

    def of(self, whole: Tensor) -> Tensor:
        """The piece of the whole tensor, a view."""
        part = whole if self.expert is None else whole[self.expert]
        if self.transposed:
            part = part.t()
        return self.split.of(part if self.rows is None else part[self.rows])

    @property
    def contiguous(self) -> bool:
        """Whether it is one range of the tensor's memory."""
        every = self.rows is None or self.rows.step == 1
        return every and not self.transposed and self.split.dim in (None, 0)

    @property
    def as_slice(self) -> Slice | None:
        """The same as a slice of the tensor, if it is one."""
        if self.transposed or self.expert is not None or (self.rows and self.rows.step != 1):
            return None
        if self.rows is None:
            return self.split
        if self.split.dim == 1:
            return None
        return Slice(0, self.rows.start + self.split.start, self.shape[0])


def piece_of(
    entry: Entry, index: int, arch: Architecture, rank: int, size: int, padded_vocab: int
) -> Piece:
    """The piece that a rank holds of one part of an entry; the other arguments as in `tp_slice`."""
    part = entry.parts[index]
    shape = part.sizes(arch.sizes)
    own = tp_slice(entry.split, shape, rank, size, padded_vocab)
    rows = None
    if sum(other.name == part.name for other in entry.parts) > 1:
        first = part.first_row(arch.sizes)
        rows = slice(first, first + (shape[0] - 1) * part.step + 1, part.step)
    expert = entry.expert if part.of_experts else None
    return Piece(own, own.shape(shape), rows, part.transposed, expert)


def tp_slice(
    split: Split, shape: tuple[int, ...], rank: int, size: int, padded_vocab: int
) -> Slice:
    """The slice of a Hugging Face tensor of `shape` that TP rank `rank` of `size` holds.

    The slice is empty if the rank holds only padding. For a routed expert pass the
    expert-tensor-parallel rank and size.
    """
    if split is Split.REPLICATED or (size == 1 and split is not Split.VOCAB):
        return Slice(None)
    if split is Split.VOCAB:
        part = padded_vocab // size
        start = min(rank * part, shape[0])
        return Slice(0, start, min(start + part, shape[0]) - start)
    dim = 1 if split is Split.ROW else 0
    part = shape[dim] // size
    return Slice(dim, rank * part, part)


def pack(split: Split, pieces: Sequence[Tensor], group: int, out: Tensor) -> None:
    """Fill a Megatron parameter from this rank's pieces; vocabulary padding becomes zero.

    `group` is the size of `Entry.group`.
    """
    if split is Split.VOCAB:
        rows = pieces[0].size(0)
        out[:rows].copy_(pieces[0])
        out[rows:].zero_()
        return
    for view, piece in zip(unpack(split, out, group, [p.size(0) for p in pieces]), pieces):
        view.copy_(piece.view(view.shape))


def unpack(split: Split, param: Tensor, group: int, rows: Sequence[int]) -> list[Tensor]:
    """View a Megatron parameter as pieces, one for each part of its entry.

    `group` is the size of `Entry.group`; `rows` are the pieces' sizes along dim 0. Pieces of a QKV
    split have one more dimension, [groups, rows / groups, ...].
    """
    if split is Split.QKV:
        # A rank has whole KV heads, or part of one.
        groups = max(rows[1] // group, 1)
        by_group = param.view(groups, param.size(0) // groups, *param.shape[1:])
        return list(torch.split(by_group, [n // groups for n in rows], dim=1))
    if split is Split.STACKED:
        return list(torch.split(param, list(rows), dim=0))
    return [param[: rows[0]]]


def weight_specs(arch: Architecture, dtype: torch.dtype, head: str = "lm") -> list[TensorSpec]:
    """The name, shape and dtype of every weight of the model, in the order of `weight_tensors`."""
    name = str(dtype).removeprefix("torch.")
    return [
        TensorSpec(hf_name, shape, each)
        for hf_name, shape, each in weight_tensors(arch, name, head)
    ]


# --- a built model --------------------------------------------------------------------------------


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and Float16Module."""
    while not hasattr(chunk, "decoder"):
        inner = getattr(chunk, "module", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"{type(chunk).__name__}: a module without a decoder, expected a GPTModel or a"
                " wrapper"
            )
        chunk = inner
    return chunk


def global_name(model: nn.Module, name: str) -> str:
    """A parameter's name with layer and expert counted over the whole model.

    The spelling is that of the local layer spec.
    """
    match = LAYER.match(name)
    if match is None and not name.startswith(MTP_LAYER):
        return name
    path = MTP_LAYER[:-1] if match is None else f"decoder.layers.{match[1]}"
    layer = model.get_submodule(path)
    rest = local_spelling(name.removeprefix(MTP_LAYER) if match is None else match[2])
    if expert := EXPERT.match(rest):
        here: list[int] = layer.mlp.local_expert_indices  # type: ignore[union-attr,assignment]
        rest = f"mlp.experts.local_experts.{here[int(expert[1])]}.{expert[2]}"
    if match is None:
        return MTP_LAYER + rest
    return f"decoder.layers.{int(layer.layer_number) - 1}.{rest}"  # type: ignore[arg-type]


def owned_parameters(
    chunks: Sequence[nn.Module], arch: Architecture
) -> Iterator[tuple[Entry, Tensor, bool]]:
    """Yield (entry, weight, is a copy) for this rank's parameters, and for saved buffers.

    A layer for multi-token prediction is left out if `arch` is of a model without.

    With tied embeddings and pipeline stages the last stage holds a copy of the first stage's word
    embedding as its output layer. The copy is loaded like the embedding and never exported.
    """
    table = {entry.megatron: entry for entry in arch.entries()}
    for chunk in chunks:
        model = unwrap(chunk)
        for local, param in named_weights(model):
            name = global_name(model, local)
            if name.startswith(MTP) and not arch.mtp:
                continue
            copy = name == OUTPUT_LAYER and arch.tie_word_embeddings
            entry = table.get(WORD_EMBEDDING if copy else name)
            if entry is None:
                raise KeyError(f"{name}: no entry in the {arch.family} table")
            yield entry, param, copy


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model but its adapters', then the buffers that its folder holds."""
    yield from (found for found in model.named_parameters() if ".lora." not in found[0])
    yield from saved_buffers(model)
