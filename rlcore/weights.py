"""The format in which weights are published: Hugging Face names, flat buckets of bytes.

`add_product` multiplies with them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlcore.planning.publication import cut, together

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the name of a base model's module; SGLang reads PEFT's names."""
FACTORS = (".lora_A.weight", ".lora_B.weight")
"""What the names of an adapter's matrices end with."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and type of one tensor."""

    name: str  # Hugging Face name
    shape: tuple[int, ...]
    dtype: str  # "float32" | "bfloat16", as torch prints it

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type. Raises ValueError if torch does not know it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.name}: {self.dtype!r} is not a torch dtype")
        return dtype

    @property
    def num_bytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


def are_factors(specs: Sequence[TensorSpec]) -> bool:
    """Whether a layout is one of adapters."""
    return bool(specs) and all(spec.name.endswith(FACTORS) for spec in specs)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together, one after the other, as one flat vector of bytes."""

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(t.num_bytes for t in self.tensors)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield name and view of each tensor in `flat`, uint8 [num_bytes]."""
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
    """Cut tensors into buckets of at most `bucket_bytes`, in order.

    A larger tensor gets a bucket of its own. A bucket never mixes dtypes of different sizes, so
    every view is aligned. Tensors that an engine loads only together stay in one bucket, whatever
    their size.
    """
    found = list(specs)
    sizes = [(spec.num_bytes, spec.dtype) for spec in found]
    whole = together([spec.name for spec in found])
    return tuple(
        Bucket(index, tuple(found[part.start : part.stop]))
        for index, part in enumerate(cut(sizes, bucket_bytes, whole))
    )


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a model's folder holds, such as the bias of a sigmoid router."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order on the host, as a view where possible."""
    return tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy().data


def fingerprint(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def add_product(
    out: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Set `out` to beta * out + alpha * a @ b, rounded to nothing coarser than its own dtype.

    Products of two bf16 numbers are exact in fp32, in which every kernel sums them; usually the
    sum is then rounded to bf16. On a GPU the matmul writes the fp32 sum itself; torch's CPU has no
    such matmul, so copies of the factors in fp32 are multiplied.

    Args:
        out: fp32, or of the factors' dtype. With `beta` 0 its old values are ignored.
        a: [n, k].
        b: [k, m], of the dtype of `a`.

    Returns:
        `out`, [n, m].
    """
    if out.dtype == a.dtype:
        return out.addmm_(a, b, alpha=alpha, beta=beta)
    if out.device.type == "cpu":
        return out.addmm_(a.to(out.dtype), b.to(out.dtype), alpha=alpha, beta=beta)
    # Into a matrix of the factors' dtype addmm needs no `out_dtype`, into a wider one it does.
    return torch.addmm(out, a, b, out_dtype=out.dtype, alpha=alpha, beta=beta, out=out)
