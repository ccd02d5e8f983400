"""Buckets that are loaded as SGLang's schedulers load them, with and without a stream to receive.

The other process of `groups.py` posts a broadcast, a digest and copies for each bucket, and waits
for nothing but the digest of the bucket before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from one_gpu.section import Found

from rlcore.weights import fingerprint
from rollout.engines.sglang.patches.bucket_digests import whole
from rollout.engines.sglang.patches.receiving_stream import ReceivingStream
from rollout.weight_sync.digests import Digest, digest, new_order
from rollout.weight_sync.process_group import WeightGroup

if TYPE_CHECKING:
    from one_gpu.groups import Groups

TENSORS = 64  # of a bucket
BUCKETS = 8


def load(group: WeightGroup, size: int, orders: Sequence[str], *, beside: bool) -> list[str]:
    """Load a bucket for each order. Returns digests, then fingerprints of what was loaded."""
    device = group.device
    stream = ReceivingStream(device if beside else torch.device("cpu"))
    weights = torch.zeros(len(orders), size, dtype=torch.uint8, device=device)
    found: list[str] = []
    last: Digest | None = None
    for order, own in zip(orders, weights):
        one = Digest(order, device)
        tensors = stream.receive(lambda: _receive(group, size))
        one.take(whole(tensors))
        for (_, tensor), place in zip(tensors, own.chunk(TENSORS)):
            place.copy_(tensor)
        del tensors
        if last is not None:
            found.append(last.read())
        last = one
    if last is not None:
        found.append(last.read())
    return found + [fingerprint(own) for own in weights]


def _receive(group: WeightGroup, size: int) -> list[tuple[str, torch.Tensor]]:
    flat = torch.empty(size, dtype=torch.uint8, device=group.device)
    group._group.broadcast(flat, 0).wait()  # NCCL's `wait` is the stream's
    return [(str(index), part) for index, part in enumerate(flat.chunk(TENSORS))]


def compare(groups: Groups, found: Found) -> None:
    """Check what is loaded, and give the rates of both ways."""
    for beside in (False, True):
        with groups.joined() as group:
            groups.sent_wrong(group, 1)  # makes the communicator
            orders = [new_order("linear") for _ in range(BUCKETS)]
            groups.member.tell("load", groups.size, orders, beside)
            began = time.perf_counter()
            for index in range(BUCKETS):
                group.send(groups.bucket(index))
            told = groups.member.answer()
            seconds = time.perf_counter() - began
        sent = [groups.bucket(index) for index in range(BUCKETS)]
        right = [digest(order, flat) for order, flat in zip(orders, sent)]
        right += [fingerprint(flat) for flat in sent]
        how = "beside the last one" if beside else "after the last one"
        wrong = sum(one != other for one, other in zip(told, right, strict=True))
        found.check(f"groups: wrong digests and weights, received {how}", float(wrong), 0.0)
        rate = BUCKETS * groups.size / seconds / 1e9
        found.number(f"groups: loaded with digests, received {how}", rate, "GB/s")
