"""Loading a Hugging Face folder: every rank reads only the slices of its Megatron parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backends.megatron.convert.adapters import factor_rows
from backends.megatron.convert.architecture import Architecture, tensor_shapes
from backends.megatron.convert.layout import Piece, Slice, owned_parameters, pack, piece_of
from backends.megatron.convert.peft_folder import check_settings
from backends.megatron.convert.read import open_shard, tensor_files
from backends.megatron.convert.table import VALUE_HEAD, Split
from backends.megatron.parallel.state import ParallelState
from rlcore.adapter_folder import ADAPTER_FILE
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ModelError
from rlcore.hf_folder import DTYPE_NAMES
from rlcore.weights import PEFT_PREFIX

# The numbers of four bits: a sign, two bits of exponent, one of mantissa.
_FP4 = [sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight$"
)


class SafetensorsFolder:
    """Slices of the tensors of a folder, by name.

    A file is opened at first use, and memory-mapped instead of read.

    Args:
        file_of: the file of each tensor; default: as a model's folder says.
    """

    def __init__(self, folder: Path, file_of: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of = tensor_files(folder) if file_of is None else file_of

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._file_of.keys()

    def read(self, name: str, shape: tuple[int, ...], part: Slice) -> Tensor:
        """Read `part` of tensor `name`, which must have the given full shape.

        A matrix of an expert may lie in the tensor of all experts of its layer.
        """
        if name not in self._file_of:
            if f"{name}_blocks" in self._file_of:
                return self._mxfp4(name, shape, part)
            if (stacked := self._of_expert(name, shape, part)) is not None:
                return stacked
            raise ModelError(f"{self.folder}: no tensor {name!r} in its safetensors files")
        stored = self.lazy(name)
        if tuple(stored.get_shape()) != shape:
            raise ModelError(
                f"{self.folder}: tensor {name!r} has shape {tuple(stored.get_shape())}, config.json"
                f" makes it {shape}"
            )
        if part.dim is None:
            return stored[:]
        # The rank holds only padding; safetensors refuses an empty slice.
        if part.length == 0:
            return torch.empty(part.shape(shape))
        end = part.start + part.length
        return stored[part.start : end] if part.dim == 0 else stored[:, part.start : end]

    def lazy(self, name: str) -> Any:
        """A tensor as safetensors' slice, which is read when it is indexed."""
        return self._file(self._file_of[name]).get_slice(name)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self._file_of[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor. Raises ModelError for one that no model has."""
        stored = self.lazy(name).get_dtype()
        found = [long for long, short in DTYPE_NAMES.items() if short == stored]
        if not found:
            raise ModelError(
                f"{self.folder}: {name} is {stored}, expected {', '.join(DTYPE_NAMES.values())};"
                " convert the folder to bf16 first"
            )
        dtype: torch.dtype = getattr(torch, found[0])
        return dtype

    def stored_name(self, name: str) -> str:
        """The tensor that holds `name`: itself, or an expert's layer's tensor of all experts."""
        found = None if name in self._file_of else _EXPERT.match(name)
        if found is None:
            return name
        stacked = f"{found['experts']}.{'down' if found['kind'] == 'down' else 'gate_up'}_proj"
        return stacked if stacked in self._file_of else name

    def read_piece(self, name: str, shape: tuple[int, ...], piece: Piece) -> Tensor:
        """Read `piece` of tensor `name`, which must have the given full shape."""
        if (part := piece.as_slice) is not None:
            return self.read(name, shape, part)
        if piece.expert is None:
            return piece.of(self.read(name, shape, Slice(None)))
        of_expert = self.read(name, shape, Slice(0, piece.expert, 1))
        return replace(piece, expert=0).of(of_expert)

    def _mxfp4(self, name: str, shape: tuple[int, ...], part: Slice) -> Tensor:
        """Read a slice of a tensor of all experts [experts, columns, rows], stored in MXFP4.

        The transposes are stored, rows in blocks of 32: half a byte for each number, low bits
        first, and one exponent (OCP Microscaling Formats 1.0).
        """
        blocks, scales = (self.lazy(f"{name}_{kind}") for kind in ("blocks", "scales"))
        stored = tuple(blocks.get_shape())
        if (stored[0], stored[1], math.prod(stored[2:]) * 2) != (shape[0], shape[2], shape[1]):
            raise ModelError(
                f"{self.folder}: tensor {name + '_blocks'!r} has shape {stored}, config.json makes"
                f" {name!r} {shape}"
            )
        experts = slice(part.start, part.start + part.length) if part.dim == 0 else slice(None)
        packed: Tensor = blocks[experts]
        exponents = scales[experts].to(torch.int32) - 127
        values = torch.tensor(_FP4)[torch.stack((packed & 15, packed >> 4), -1).long()]
        numbers = torch.ldexp(values.flatten(-2), exponents[..., None])
        whole = numbers.flatten(2).transpose(1, 2)
        return whole if part.dim in (None, 0) else part.of(whole)

    def _of_expert(self, name: str, shape: tuple[int, ...], part: Slice) -> Tensor | None:
        """Read from `experts.gate_up_proj` [experts, 2 * width, hidden], or `experts.down_proj`."""
        found = _EXPERT.match(name)
        stacked = self.stored_name(name)
        if found is None or stacked == name:
            return None
        gated = found["kind"] != "down"
        stored = self.lazy(stacked)
        whole = tuple(stored.get_shape())
        rows = shape[0] * (2 if gated else 1)
        expert = int(found["expert"])
        if whole[1:] != (rows, shape[1]) or expert >= whole[0]:
            raise ModelError(
                f"{self.folder}: tensor {stacked!r} has shape {whole}, config.json makes it"
                f" (experts, {rows}, {shape[1]})"
            )
        first = shape[0] if found["kind"] == "up" else 0
        own = Slice(0, 0, shape[0]) if part.dim is None else part
        if own.dim == 0:
            start = first + own.start
            read: Tensor = stored[expert : expert + 1, start : start + own.length][0]
        else:
            end = own.start + own.length
            read = stored[expert : expert + 1, first : first + shape[0], own.start : end][0]
        return read

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(open_shard(self.folder / name, "pt"))
        return self._open[name]


@torch.no_grad()
def load_hf(
    chunks: Sequence[nn.Module], arch: Architecture, folder: Path | str, parallel: ParallelState
) -> None:
    """Fill this rank's model chunks from a folder, in place and without communication.

    Vocabulary padding becomes zero. `arch` is the built model's architecture; the folder may be
    another model of this architecture, or a sequence classifier whose `score.weight` becomes the
    value head. A language model's folder leaves the value head unchanged. Raises ModelError for a
    shard or tensor that is missing or has another shape.
    """
    with SafetensorsFolder(Path(folder)) as source:
        for entry, param, _ in owned_parameters(chunks, arch):
            if entry.megatron == VALUE_HEAD and entry.parts[0].name not in source.names:
                continue
            padded = param.size(0) * parallel.tp_size if entry.split is Split.VOCAB else 0
            rank, size = parallel.split_of(expert=entry.expert is not None)
            shapes = tensor_shapes(arch, entry)
            pieces = []
            for index, part in enumerate(entry.parts):
                piece = piece_of(entry, index, arch, rank, size, padded)
                pieces.append(source.read_piece(part.name, shapes[part.name], piece))
            pack(entry.split, pieces, arch.sizes[entry.group], param.data)


@torch.no_grad()
def load_adapters(
    factors: Mapping[str, Tensor],
    arch: Architecture,
    config: LoraConfig,
    parallel: ParallelState,
    folder: Path,
    key: str,
) -> None:
    """Fill this rank's factors, of `named_factors`, from a PEFT folder, in place.

    Args:
        key: the configuration key with the folder, for messages.

    Raises ModelError for settings other than `config`, and for a tensor that is missing, unknown or
    of another shape.
    """
    check_settings(folder, config, arch, key)
    rows = factor_rows(arch, config)
    with open_shard(folder / ADAPTER_FILE, "pt") as file:
        names = set(file.keys())
    wanted = {PEFT_PREFIX + entry.parts[0].name for entry, _ in rows}
    if extra := sorted(names - wanted):
        raise ModelError(
            f"{folder}: tensor {extra[0]!r} is of no adapter of this run: policy.lora.targets is"
            f" {', '.join(config.targets)}"
        )
    with SafetensorsFolder(folder, dict.fromkeys(names, ADAPTER_FILE)) as source:
        for entry, shape in rows:
            if entry.megatron not in factors:
                continue
            rank, size = parallel.split_of(expert=entry.expert is not None)
            name = PEFT_PREFIX + entry.parts[0].name
            pieces = [
                source.read_piece(name, shape, piece_of(entry, index, arch, rank, size, 0))
                for index in range(len(entry.parts))
            ]
            pack(entry.split, pieces, arch.sizes[entry.group], factors[entry.megatron])
