"""How weights travel: Hugging Face names, a static layout cut once into flat buckets of bytes,
digests to compare ends.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TensorSpec:
    name: str  # Hugging Face name
    shape: tuple[int, ...]
    dtype: str  # "float32" | "bfloat16", as torch prints it

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.name}: {self.dtype!r} is not a torch dtype")
        return dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of each tensor in `flat`, uint8 [num_bytes]."""
        if flat.dtype != torch.uint8 or flat.shape != (self.num_bytes,):
            raise ValueError(
                f"bucket {self.index}: got {flat.dtype} {tuple(flat.shape)}, expected uint8"
                f" ({self.num_bytes},)"
            )
        at = 0
        for spec in self.tensors:
            piece = flat[at : at + spec.num_bytes]
            yield spec.name, piece.view(spec.torch_dtype).view(spec.shape)
            at += spec.num_bytes


def cut_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes`, in the order given; a larger tensor gets a bucket of its
    own.

    A bucket never mixes dtypes of different sizes, so that every view is aligned.
    """
    buckets: list[Bucket] = []
    pending: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if pending and (size + spec.num_bytes > bucket_bytes or spec.dtype != pending[0].dtype):
            buckets.append(Bucket(len(buckets), tuple(pending)))
            pending = []
            size = 0
        pending.append(spec)
        size += spec.num_bytes
    if pending:
        buckets.append(Bucket(len(buckets), tuple(pending)))
    return tuple(buckets)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a model's folder holds beside its parameters: the bias of a sigmoid router,
    for one.
    """
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, on the host: a view where they lie there like that."""
    return tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().data


def fingerprint(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def combine_fingerprints(fingerprints: Mapping[str, str]) -> str:
    """One digest of `{name: fingerprint}`, whatever the order in which they came."""
    lines = "".join(f"{name} {fingerprints[name]}\n" for name in sorted(fingerprints))
    return hashlib.sha256(lines.encode()).hexdigest()


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """One digest of named tensors: equal exactly when names, types, shapes and all bytes are."""
    return combine_fingerprints({name: fingerprint(tensor) for name, tensor in named})
