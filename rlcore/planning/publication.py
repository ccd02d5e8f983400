"""How a publication's weights are cut into buckets, and the memory of the buckets on a rank."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.planning.memory import Layout

# The minimum number of buckets, so that gathering, sending and applying overlap.
BUCKETS = 16
# Buckets are not cut below this size for it, since each costs a round trip.
SMALL_BUCKET = 16 << 20
# SGLang fuses these if both come in one call, and silently drops them if they come in two (its
# loaders of latent attention).
FUSED = ((".q_a_proj.", ".kv_a_proj_with_mqa."),)
BLOCK = 128  # rows and columns per scale of a matrix in FP8
# `kv_a_proj_with_mqa` belongs to latent attention, `w1` to `w3` to Mixtral.
# Not `eh_proj` and `input_proj` of multi-token prediction, which SGLang keeps in bf16.
_PROJECTION = re.compile(r"(?<!\.eh)(?<!\.input)(_proj|_proj_with_mqa|\.w[123])\.weight$")


def bucket_limit(model_bytes: int, bucket_bytes: int) -> int:
    """Return the maximum bytes of a model's buckets, if `bucket_bytes` are allowed."""
    return min(bucket_bytes, max(SMALL_BUCKET, model_bytes // BUCKETS))


def is_projection(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is rounded to FP8: matrices of attention, MLPs and experts."""
    return len(shape) == 2 and _PROJECTION.search(name) is not None


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix in FP8, one scale for each block."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def fp8_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a matrix in FP8, including its scales in fp32."""
    return math.prod(shape) + 4 * math.prod(scale_shape(shape))


def together(names: Sequence[str]) -> list[range]:
    """Return the ranges of tensors that must stay in one bucket (`FUSED`)."""
    positions = {name: at for at, name in enumerate(names)}
    found: list[range] = []
    for one, other in FUSED:
        for name, at in positions.items():
            partner = positions.get(name.replace(one, other)) if one in name else None
            if partner is not None:
                found.append(range(min(at, partner), max(at, partner) + 1))
    return found


def cut(tensors: Sequence[tuple[int, str]], most: int, whole: Sequence[range] = ()) -> list[range]:
    """Cut (bytes, dtype) of tensors into buckets of at most `most` bytes, in order.

    A larger tensor gets a bucket of its own. No bucket mixes dtypes.

    Args:
        whole: ranges of tensors of one dtype that are never divided.
    """
    # Positions that stay in the bucket of the tensor before them.
    joined = {at for place in whole for at in place[1:]}
    starts = [at for at in range(len(tensors)) if at not in joined]
    found: list[range] = []
    first = 0
    size = 0
    for at, end in zip(starts, [*starts[1:], len(tensors)]):
        num_bytes = sum(tensors[one][0] for one in range(at, end))
        if at > first and (size + num_bytes > most or tensors[at][1] != tensors[first][1]):
            found.append(range(first, at))
            first = at
            size = 0
        size += num_bytes
    if tensors:
        found.append(range(first, len(tensors)))
    return found


@dataclass(frozen=True)
class Publication:
    """How a run publishes its policy.

    Attributes:
        buckets: bytes of each bucket, as received by engines.
        bucket_limit: maximum bytes of a bucket, unless one tensor is larger.
        unrounded: bytes of the largest bucket before rounding to FP8; 0 without rounding.
        engines: number of engines.
        transport: as configured, or "copy" if the only engine lives in rank 0's process.
        senders: maximum number of trainer ranks whose network cards carry the weights.
        engine_tensor: tensor-parallel ranks of an engine.
        engine_dtype_bytes: bytes per number in an engine, its KV cache included.
        colocated: engines take turns with the trainer on its GPUs.
        adapters: bytes of the adapters that follow the first publication; 0: all weights do.
    """

    buckets: tuple[int, ...]
    bucket_limit: int
    engines: int
    transport: str
    senders: int
    unrounded: int = 0
    engine_tensor: int = 1
    engine_dtype_bytes: int = 2
    colocated: bool = False
    adapters: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the published model."""
        return sum(self.buckets)

    @property
    def engine_bytes(self) -> int:
        """Bytes of the weights on each GPU of an engine."""
        return self.num_bytes // self.engine_tensor

    def is_everywhere(self, layout: Layout) -> bool:
        """Whether every rank gets every bucket, rather than only rank 0."""
        many = min(self.senders, layout.gpus) > 1
        return self.transport == "tensor" or (self.transport == "distributed" and many)

    def engines_of_a_sender(self, layout: Layout) -> int:
        """Return the maximum number of engines that one rank sends to over NCCL."""
        if self.transport != "distributed":
            return 0
        return math.ceil(self.engines / min(self.senders, layout.gpus))

    def buffers(self, layout: Layout) -> int:
        """Return the maximum bytes that a rank keeps until the next publication.

        They hold two buckets, one bucket before rounding, and parts of the size of one bucket that
        the ranks of a replica exchange. `rlcore dryrun` measures them.
        """
        parts = self.bucket_limit if layout.tensor * layout.pipeline * layout.expert > 1 else 0
        return self.two_buckets + self.unrounded + parts

    @property
    def two_buckets(self) -> int:
        """Bytes of two buffers that serve alternate buckets."""
        return sum(max(self.buckets[parity::2], default=0) for parity in (0, 1))
