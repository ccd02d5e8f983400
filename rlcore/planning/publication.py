"""A publication of weights: how they are cut into buckets, and a calculation of its time and bytes.

For every bucket the times of its stages follow one another as they do in a run: a bucket is
assembled and broadcast while the one before it is sent; an engine loads the one before it while it
receives a bucket. Rank 0 makes the calls for the next bucket meanwhile.

    one sender     rank 0 gathers through its network card, and each engine's copy leaves through it
    a sender each  a bucket is assembled over NVLink on the rank that has most of it, is broadcast
                   once, and leaves each sender once for each engine that it serves; through the
                   cards of several ranks where these have nothing else to do (rails)

Nothing of this was measured on a cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.planning.devices import GPUS_PER_NODE, Gpu
from rlcore.planning.memory import Layout

# At least so many, so that gathering, sending and applying overlap ...
BUCKETS = 16
# ... but no bucket is made smaller for it: each costs a round trip.
SMALL_BUCKET = 16 << 20
# SGLang fuses these when both come in one call, and drops them without a word when they come in two
# (its loaders of latent attention).
FUSED = ((".q_a_proj.", ".kv_a_proj_with_mqa."),)
BLOCK = 128  # rows and columns of a matrix in FP8 that have one scale
# `kv_a_proj_with_mqa` is latent attention's, `w1` to `w3` are Mixtral's
_PROJECTION = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")


def bucket_limit(model_bytes: int, bucket_bytes: int) -> int:
    """Return the most bytes of a bucket of a model, where `bucket_bytes` are allowed."""
    return min(bucket_bytes, max(SMALL_BUCKET, model_bytes // BUCKETS))


def is_projection(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is rounded to FP8: the matrices of attention and MLPs, and of experts."""
    return len(shape) == 2 and _PROJECTION.search(name) is not None


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix in FP8, one for each block."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def fp8_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a matrix in FP8, and of its scales in fp32."""
    return math.prod(shape) + 4 * math.prod(scale_shape(shape))


def together(names: Sequence[str]) -> list[range]:
    """Return the ranges of tensors that must stay in one bucket (`FUSED`)."""
    places = {name: at for at, name in enumerate(names)}
    found: list[range] = []
    for one, other in FUSED:
        for name, at in places.items():
            partner = places.get(name.replace(one, other)) if one in name else None
            if partner is not None:
                found.append(range(min(at, partner), max(at, partner) + 1))
    return found


def cut(tensors: Sequence[tuple[int, str]], most: int, whole: Sequence[range] = ()) -> list[range]:
    """Cut (bytes, dtype) of tensors into buckets of at most `most` bytes, in order.

    A larger tensor gets a bucket of its own. No bucket mixes dtypes.

    Args:
        whole: tensors of one dtype that are never cut apart, as if they were one.
    """
    joined = {at for place in whole for at in place[1:]}  # to the tensor before them
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


# --- time -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Bytes and seconds of the stages of a bucket."""

    card: float = 48e9  # bytes/s through one network card of 400 Gbit/s
    nvlink: float = 300e9  # bytes/s into one rank from its node
    broadcast: float = 192e9  # bytes/s to all ranks: half of what the cards of a node have
    bucket_s: float = 0.006  # of the engine's process, while its GPU receives; on a CPU
    call_s: float = 0.0003  # of rank 0's CPU, a control call

    @classmethod
    def of(cls, gpu: Gpu) -> Costs:
        """Take the usable part of a GPU's links: of an H100's the defaults."""
        card = 0.96 * gpu.network_bandwidth
        return cls(card=card, nvlink=gpu.node_bandwidth * 2 / 3, broadcast=GPUS_PER_NODE * card / 2)


def one_sender(buckets: Sequence[int], engines: int, costs: Costs) -> float:
    """Return the seconds where rank 0 gathers everything, and sends it to every engine.

    Args:
        buckets: bytes of each.
    """
    made = [size / costs.card for size in buckets]
    return in_turn(made, _sent(buckets, engines, engines, costs))


def sender_each(
    buckets: Sequence[int], engines: int, senders: int, costs: Costs, rails: int = 1
) -> float:
    """Return the seconds where each engine has a sender; several share one if these are fewer.

    Args:
        rails: ranks whose cards carry the weights of an engine.
    """
    copies = -(-engines // senders)  # that leave the busiest sender
    shared = 1 / GPUS_PER_NODE  # what a card carries of the broadcast between the ranks
    made = [size / costs.nvlink + size / costs.broadcast for size in buckets]
    return in_turn(made, _sent(buckets, copies / rails + shared, engines, costs))


def _sent(buckets: Sequence[int], copies: float, engines: int, costs: Costs) -> list[float]:
    """Return the seconds from the order of each bucket until all engines have loaded it.

    Args:
        copies: that leave through a card.
    """
    calls = engines * costs.call_s
    return [max(copies * size / costs.card, costs.bucket_s, calls) for size in buckets]


def in_turn(made: Sequence[float], sent: Sequence[float]) -> float:
    """Return the end of the last bucket: each is made while the one before it is sent."""
    ready = made[0]
    for making, sending in zip([*made[1:], 0.0], sent):
        ready += max(making, sending)
    return ready


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedBucket:
    """The bytes of a bucket, and of the tensors in it whose parts need memory beside it."""

    size: int
    whole: int = 0  # as it is assembled, if that is more: engines take FP8
    columns: int = 0  # cut over TP along dim 1: parts from other ranks come into a buffer
    expert_columns: int = 0  # the same of experts, cut over expert-TP
    groups: int = 0  # q, k, v: parts that Megatron holds interleaved are copied before they go


@dataclass(frozen=True)
class Publication:
    """How a run publishes its policy.

    `transport` is as configured, and "copy" where the one engine lives in rank 0's process.
    """

    buckets: tuple[PublishedBucket, ...]
    engines: int
    transport: str
    senders: int  # ranks that engines are dealt to, at most
    kv_groups: int  # KV heads of the model
    converted: bool = False  # engines have another dtype than the trainer
    rails: int = 1  # ranks whose cards carry the weights of an engine, at most
    engine_tensor: int = 1  # tensor-parallel ranks of an engine
    engine_dtype_bytes: int = 2  # of what it computes in, its KV cache included
    colocated: bool = False  # engines take turns with the trainer on its GPUs

    @property
    def num_bytes(self) -> int:
        """Bytes of the model, as they are published."""
        return sum(bucket.size for bucket in self.buckets)

    @property
    def engine_bytes(self) -> int:
        """Bytes of the weights on each GPU of an engine."""
        return self.num_bytes // self.engine_tensor

    def sending_ranks(self, layout: Layout) -> int:
        """Return how many ranks send to engines."""
        return min(self.senders, layout.gpus) if self.transport == "distributed" else 1

    def rails_of(self, layout: Layout) -> int:
        """Return how many ranks are in the group of an engine that has a sender of its own."""
        ranks = self.sending_ranks(layout)
        if self.transport != "distributed" or self.engines > ranks:
            return 1
        return min(self.rails, layout.gpus // ranks, GPUS_PER_NODE)

    def is_everywhere(self, layout: Layout) -> bool:
        """Whether every rank gets every bucket, and not rank 0 alone."""
        ranks = self.sending_ranks(layout) * self.rails_of(layout)
        return self.transport == "tensor" or ranks > 1

    def buffers(self, layout: Layout, *, rank0: bool) -> int:
        """Return the bytes of rank 0, or of another rank, that stay until the next publication.

        These are two buckets, one before it is rounded to FP8, parts that are received, and two
        buckets' parts that are sent; parts of less than 1 MB are not counted.
        """
        buckets = self.two_buckets + self.unrounded
        received = self._received(layout)
        copied = self._copied(layout)
        if self.is_everywhere(layout):
            # Of ranks with like parts the first assembles; with experts that is not always the same
            aside = received + copied if layout.expert > 1 else max(received, copied)
            return buckets + aside
        return buckets + received if rank0 else copied

    def passed_on(self, layout: Layout) -> int:
        """Return the bytes of a bucket that a rank which helps holds for a moment."""
        return max(bucket.size for bucket in self.buckets) if self.rails_of(layout) > 1 else 0

    @property
    def unrounded(self) -> int:
        """Bytes of the largest bucket before it is rounded; 0 where none is."""
        return max((one.whole for one in self.buckets if one.whole > one.size), default=0)

    @property
    def two_buckets(self) -> int:
        """Bytes of the two buckets that are alive at once, at most."""
        return _of_two([bucket.size for bucket in self.buckets])

    def _received(self, layout: Layout) -> int:
        """Return the bytes of other ranks' parts that do not come into their bucket at once."""
        tp = layout.tensor
        etp = layout.expert_tensor
        dense = max(bucket.columns for bucket in self.buckets) * (tp - 1) // tp
        return dense + max(bucket.expert_columns for bucket in self.buckets) * (etp - 1) // etp

    def _copied(self, layout: Layout) -> int:
        """Return the bytes of two buckets' parts that a rank arranges before it sends them."""
        tp = layout.tensor
        parts = [
            max(bucket.whole, bucket.size) if self.converted else bucket.groups
            for bucket in self.buckets
        ]
        if not self.converted and self.kv_groups <= tp:
            return 0
        if tp == 1 and layout.expert == 1 and self.is_everywhere(layout):
            # A stage is one rank's, which assembles its buckets itself, but for one with two stages
            return max(parts) if layout.pipeline > 1 else 0
        if tp * layout.pipeline * layout.expert == 1:
            return 0
        return _of_two(parts) // tp

    def seconds(self, layout: Layout, costs: Costs) -> float | None:
        """Return the calculated seconds; None for a transport that has no formula."""
        if self.transport != "distributed":
            return None
        sizes = [bucket.size for bucket in self.buckets]
        ranks = self.sending_ranks(layout)
        rails = self.rails_of(layout)
        if ranks * rails == 1:
            return one_sender(sizes, self.engines, costs)
        return sender_each(sizes, self.engines, ranks, costs, rails)


def _of_two(sizes: Sequence[int]) -> int:
    """Return the bytes of two buffers that serve every other bucket each."""
    return sum(max(sizes[parity::2], default=0) for parity in (0, 1))
