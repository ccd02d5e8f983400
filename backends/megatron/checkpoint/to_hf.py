"""Conversion of a checkpoint to a Hugging Face folder without a model, one parameter at a time.

The conversion needs no GPU and no process group, and memory for a few times the largest parameter.
A checkpoint of any layout holds every parameter whole, so any layout can be converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from backends.megatron.checkpoint.adapters import KEY
from backends.megatron.checkpoint.pickles import check_metadata
from backends.megatron.checkpoint.pieces import PieceReader
from backends.megatron.checkpoint.save_load import MANIFEST, check_architecture, read_manifest
from backends.megatron.checkpoint.shards import read_errors
from backends.megatron.convert.adapters import factor_rows
from backends.megatron.convert.architecture import (
    Architecture,
    model_entries,
    part_shapes,
    tensor_shapes,
)
from backends.megatron.convert.folder import FolderWriter, carried_tensors
from backends.megatron.convert.layout import EXPERT, LAYER, Piece, piece_of, unpack, weight_specs
from backends.megatron.convert.load import SafetensorsFolder
from backends.megatron.convert.table import FUSED_NORMS, MTP_LAYER, Entry
from backends.megatron.weights.folder import SHARD_BYTES, write_peft
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ModelError
from rlcore.weights import TensorSpec

_NAME = "policy"

# Reads the parts of an entry.
Read = Callable[[Entry], list[Tensor]]


def checkpoint_to_hf(
    checkpoint: Path,
    folder: Path,
    arch: Architecture,
    *,
    dtype: torch.dtype,
    tokenizer: Path | None = None,
    lora: LoraConfig | None = None,
    merged: bool = False,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the policy of a checkpoint in the format of `export_hf`, or adapters as a PEFT folder.

    Args:
        tokenizer: the folder with the tokenizer's files; by default the model's folder.
        lora: the adapters of the run; None if it trained all weights.
        merged: write the whole model with the adapters' products added to its weights.

    Raises:
        ModelError: the checkpoint is damaged or of another model, or `folder` holds something else.
        RunFailed: the folder could not be written.
    """
    described = read_manifest(checkpoint, [_NAME])["models"][_NAME]
    arch = replace(arch, mtp=described["architecture"].get("mtp", False))
    check_architecture(checkpoint, _NAME, arch, described)
    head = described["head"]
    specs = weight_specs(arch, dtype, head)
    stored = StoredParameters(checkpoint / _NAME)
    with ExitStack() as stack:
        read: Read = partial(stored.as_hf, arch=arch)
        if lora is not None:
            base = Path(described["adapters"]["base"])
            factors = {}
            for entry, shape in factor_rows(arch, lora):
                saved = stored.as_hf(replace(entry, megatron=KEY + entry.megatron), arch)
                whole = torch.cat([part.flatten(0, -2) for part in saved])
                factors[entry.megatron] = whole.view(shape)
            if not merged:
                narrow = {name: factor.to(dtype) for name, factor in factors.items()}
                write_peft(folder, arch, lora, base, narrow)
                return
            below = _reader(base, arch, stack)
            read = partial(_merged, read=below, factors=factors, lora=lora, arch=arch)
        elif merged:
            raise ModelError(f"{checkpoint}: it has all weights, there is nothing to merge")
        sources = (arch.folder, tokenizer or arch.folder)
        carried = carried_tensors(arch) if head == "lm" else ()
        writer = FolderWriter(folder, specs, max_shard_bytes, sources, carried=carried)
        stack.callback(writer.abandon)
        # Entries in the order of `specs`.
        entries = sorted(model_entries(arch, head), key=lambda entry: entry.dtype is not None)
        for name, tensor in _tensors(entries, read, {spec.name: spec for spec in specs}, arch):
            writer.add(name, tensor)
        writer.complete()
        writer.finish(arch.hf_config, arch.table.classes[head == "value"])


def _tensors(
    entries: Sequence[Entry], read: Read, specs: Mapping[str, TensorSpec], arch: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of entries, once all parts of each are there."""
    made: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for entry in entries:
        for index, (part, tensor) in enumerate(zip(entry.parts, read(entry), strict=True)):
            spec = specs[part.name]
            if tensor.numel() == math.prod(spec.shape):
                piece = tensor.to(spec.torch_dtype)
                yield part.name, (piece.t() if part.transposed else piece).reshape(spec.shape)
                continue
            if part.name not in made:
                made[part.name] = torch.empty(spec.shape, dtype=spec.torch_dtype)
                missing[part.name] = made[part.name].numel()
            whole = _whole(entry, index, arch)
            whole.of(made[part.name]).copy_(tensor.reshape(whole.shape))
            missing[part.name] -= tensor.numel()
            if not missing[part.name]:
                yield part.name, made.pop(part.name)


def _whole(entry: Entry, index: int, arch: Architecture) -> Piece:
    """All of one part of an entry."""
    return piece_of(entry, index, arch, 0, 1, arch.vocab_size)


def _reader(base: Path, arch: Architecture, stack: ExitStack) -> Read:
    """A function that reads an entry's tensors from a Hugging Face folder or a checkpoint."""
    if (base / MANIFEST).is_file():
        return partial(StoredParameters(base / _NAME).as_hf, arch=arch)
    if not base.is_dir():
        raise ModelError(f"{base}: the weights below the adapters are not there any more")
    source = stack.enter_context(SafetensorsFolder(base))

    def read(entry: Entry) -> list[Tensor]:
        shapes = tensor_shapes(arch, entry)
        return [
            source.read_piece(part.name, shapes[part.name], _whole(entry, index, arch))
            for index, part in enumerate(entry.parts)
        ]

    return read


def _merged(
    entry: Entry, read: Read, factors: Mapping[str, Tensor], lora: LoraConfig, arch: Architecture
) -> list[Tensor]:
    """An entry's parts with the products of their adapters, added in fp32."""
    found = []
    for index, (part, tensor) in enumerate(zip(entry.parts, read(entry), strict=True)):
        module = part.name.removesuffix(".weight")
        if (b := factors.get(f"{module}.lora_B.weight")) is not None:
            a = factors[f"{module}.lora_A.weight"].float()
            # The rows of the part.
            b = _whole(entry, index, arch).of(b)
            product = (b.float() @ a).mul_(lora.alpha / a.size(0))
            tensor = product.view(tensor.shape).add_(tensor)
        found.append(tensor)
    return found


class StoredParameters:
    """The parameters in one model's folder of a checkpoint, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = PieceReader(folder)
        with read_errors(folder):
            check_metadata(folder)
            metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, dcp.TensorStorageMetadata)
        }

    def as_hf(self, entry: Entry, arch: Architecture) -> list[Tensor]:
        """The parts of an entry, as views of its parameter."""
        shapes = part_shapes(arch, entry)
        parameter = self.read(entry.megatron)
        if parameter.numel() < sum(map(math.prod, shapes)):
            raise ModelError(
                f"checkpoint {self._folder}: {entry.megatron} has the shape"
                f" {tuple(parameter.shape)}, expected what {tensor_shapes(arch, entry)} make"
            )
        rows = [shape[0] for shape in shapes]
        return unpack(entry.split, parameter, arch.sizes[entry.group], rows)

    def read(self, megatron: str) -> Tensor:
        """Read a parameter from all of its stored boxes."""
        found = [named for named in _stored_names(megatron) if named[0] in self._stored]
        if not found:
            raise ModelError(f"checkpoint {self._folder}: it holds no {megatron}")
        name, index = found[0]
        stored = self._stored[name]
        shape = stored.size[len(index) :]
        sizes = torch.Size((*[1] * len(index), *shape))
        offsets = torch.Size((*index, *[0] * len(shape)))
        out = torch.zeros(sizes, dtype=stored.properties.dtype)
        chunk = ChunkStorageMetadata(offsets, sizes)
        items = create_read_items_for_chunk_list(name, stored, [chunk])
        if sum(math.prod(item.lengths) for item in items) != out.numel():
            raise ModelError(f"checkpoint {self._folder}: {megatron} is not whole")
        with read_errors(self._folder):
            self._reader.read_data(dcp.LoadPlan(items), _Into(out)).wait()
        return out.view(shape)


class _Into(dcp.DefaultLoadPlanner):
    """Planner that reads all items into one tensor."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self._out = out

    def resolve_tensor(self, read_item: dcp.ReadItem) -> Tensor:
        """The part of the tensor that an item fills."""
        part = self._out
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            part = part.narrow(dim, start, length)
        return part


def _stored_names(megatron: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names that a checkpoint may use for a parameter, with its index in that tensor.

    Megatron stacks equal layers into one tensor, and always stacks experts. It stores a norm under
    the name that the norm has when it is fused into the next linear layer.
    """
    layer = LAYER.match(megatron)
    if layer is None and not megatron.startswith(MTP_LAYER):
        yield megatron, ()
        return
    rest = megatron.removeprefix(MTP_LAYER) if layer is None else layer[2]
    index: tuple[int, ...] = ()
    if expert := EXPERT.match(rest):
        rest = f"mlp.experts.experts.{expert[2]}"
        index = (int(expert[1]),)
    for spelling in (rest, *(fused for fused, plain in FUSED_NORMS.items() if plain == rest)):
        if layer is None:
            yield MTP_LAYER + spelling, index
            continue
        number = int(layer[1])
        yield f"decoder.layers.{spelling}", (number, *index)
        yield f"decoder.layers.{number}.{spelling}", index
