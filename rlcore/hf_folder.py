"""Hugging Face folders: safetensors shards, written tensor by tensor, and their companion files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcore.weights import Bucket, TensorSpec, raw_bytes

INDEX = "model.safetensors.index.json"

# safetensors' names of the types that weights have.
DTYPE_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}

# Tokenizer, chat template and generation settings are copied by suffix, since the files of a
# tokenizer may have any name. Code is not copied.
_COPIED = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
_WRITTEN = {"config.json", INDEX, "pytorch_model.bin.index.json"}
# The folder in which transformers keeps chat templates with names.
_NAMED_TEMPLATES = "additional_chat_templates"


class ShardWriter:
    """Writes one file per shard into the existing `folder`.

    The writer holds no tensor in memory: when `add` returns, the tensor is in its file. Every
    method raises OSError if a write fails.

    Args:
        number, writers: which of several writers this is, each of which gets every tensor and
            writes the shards of its own.
    """

    def __init__(
        self, folder: Path, shards: Sequence[Bucket], *, number: int = 0, writers: int = 1
    ) -> None:
        self.folder = folder
        self.shards = shards
        self._number = number
        self._writers = writers
        self._file: FileIO | None = None
        # Shard and tensor that `add` expects next.
        self._shard = 0
        self._tensor = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, in the order of the shards. Its memory may then be reused."""
        shard = self.shards[self._shard]
        spec = shard.tensors[self._tensor]
        if (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.torch_dtype):
            raise ValueError(
                f"got {name} {tuple(tensor.shape)} {tensor.dtype}, expected {spec} next"
            )
        if self._shard % self._writers == self._number:
            if self._file is None:
                self._file = (self.folder / self.file_name(self._shard)).open("wb", buffering=0)
                _write(self._file, memoryview(header(shard)))
            _write(self._file, raw_bytes(tensor))
        self._tensor += 1
        if self._tensor == len(shard.tensors):
            self.close()
            self._shard = self._shard + 1
            self._tensor = 0

    @property
    def files(self) -> list[Path]:
        """The files that this writer writes."""
        own = range(self._number, len(self.shards), self._writers)
        return [self.folder / self.file_name(shard) for shard in own]

    def finish(self) -> None:
        """Write the index, if there are several shards."""
        if self._shard < len(self.shards):
            raise ValueError(
                f"finish() before {self.shards[self._shard].tensors[self._tensor].name} was added"
            )
        if len(self.shards) > 1:
            total = sum(shard.num_bytes for shard in self.shards)
            names = {
                spec.name: self.file_name(shard.index)
                for shard in self.shards
                for spec in shard.tensors
            }
            write_json(
                self.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names}
            )

    def close(self) -> None:
        """Close the open file, if any; for a writer that is abandoned before `finish`."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def file_name(self, shard: int) -> str:
        """Return the name of the file of shard number `shard`, from 0."""
        count = len(self.shards)
        if count == 1:
            return "model.safetensors"
        return f"model-{shard + 1:05d}-of-{count:05d}.safetensors"


def header(shard: Bucket) -> bytes:
    """Return the header of a shard's file: 8 bytes of length, then padded JSON."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in shard.tensors:
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (at, at + spec.num_bytes),
        }
        at += spec.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class TensorOffset:
    """The file and offset of a tensor in a folder."""

    path: Path
    offset: int  # first byte in the file
    spec: TensorSpec


def find_tensors(folder: Path) -> dict[str, TensorOffset]:
    """Find every tensor of a folder's safetensors files, by name.

    Raises:
        OSError, ValueError: a file is not readable.
    """
    types = {short: name for name, short in DTYPE_NAMES.items()}
    offsets = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError(
                    f"{path} is no safetensors file: it begins with a length of {length:,} bytes"
                )
            try:
                entries = json.loads(file.read(length))
            except RecursionError as error:
                raise ValueError(f"{path} is no safetensors file: {error}") from error
        try:
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                spec = TensorSpec(name, tuple(entry["shape"]), types[entry["dtype"]])
                offsets[name] = TensorOffset(path, 8 + length + entry["data_offsets"][0], spec)
                spec.num_bytes  # noqa: B018 - raises where the shape has no numbers
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no safetensors file: its header has {error!r}") from error
    return offsets


def copy_companions(target: Path, model: Path, tokenizer: Path) -> None:
    """Copy the tokenizer folder's files, and the generation settings of the model folder.

    Generation settings of the tokenizer's folder are used only if the model's folder has none.
    """
    companions = [
        path.relative_to(tokenizer)
        for path in sorted((*tokenizer.iterdir(), *tokenizer.glob(f"{_NAMED_TEMPLATES}/*.jinja")))
        if path.suffix in _COPIED and path.name not in _WRITTEN and path.is_file()
    ]
    for name in companions:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(tokenizer / name, target / name)
    settings = model / "generation_config.json"
    if settings.is_file():
        shutil.copyfile(settings, target / settings.name)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write(file: FileIO, content: memoryview) -> None:
    """Write all of `content`; one call of the system writes at most 2 GB."""
    while content:
        content = content[file.write(content) :]
