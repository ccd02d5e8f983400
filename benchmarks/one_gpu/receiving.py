"""Buckets that are loaded as SGLang's schedulers load them, with and without a stream to receive.

The other process of `groups.py` posts a broadcast, a digest and copies for each bucket, and waits
for nothing but the digests of the buckets before the last.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from one_gpu.section import Found

from rlcore.weights import fingerprint
from rollout.engines.sglang.patches import ReceivingStream, whole
from rollout.weight_sync.digests import Digest, new_order
from rollout.weight_sync.process_group import WeightGroup

if TYPE_CHECKING:
    from one_gpu.groups import Groups

TENSORS = 64  # of a bucket
BUCKETS = 8


def load(group: WeightGroup, size: int, order: str, *, beside: bool) -> list[str]:
    """Load buckets. Returns their digest, then fingerprints of what was loaded."""
    device = group.device
    stream = ReceivingStream(device if beside else torch.device("cpu"))
    weights = torch.zeros(BUCKETS, size, dtype=torch.uint8, device=device)
    digest = Digest(order)
    for own in weights:
        tensors = stream.receive(lambda: _receive(group, size))
        digest.add(whole(tensors))
        for (_, tensor), place in zip(tensors, own.chunk(TENSORS)):
            place.copy_(tensor)
        del tensors
    return [digest.read(), *map(fingerprint, weights)]


def _receive(group: WeightGroup, size: int) -> list[tuple[str, torch.Tensor]]:
    flat = torch.empty(size, dtype=torch.uint8, device=group.device)
    group._group.broadcast(flat, 0).wait()  # NCCL's `wait` is the stream's
    return [(str(index), part) for index, part in enumerate(flat.chunk(TENSORS))]


def compare(groups: Groups, found: Found) -> None:
    """Check what is loaded, and give the rates of both ways."""
    for beside in (False, True):
        with groups.joined() as group:
            groups.sent_wrong(group, 1)  # makes the communicator
            order = new_order("linear")
            groups.member.tell("load", groups.size, order, beside)
            began = time.perf_counter()
            for index in range(BUCKETS):
                group.send(groups.bucket(index))
            told = groups.member.answer()
            seconds = time.perf_counter() - began
        sent = [groups.bucket(index) for index in range(BUCKETS)]
        digest = Digest(order)
        for flat in sent:
            digest.add(flat)
        right = [digest.read(), *map(fingerprint, sent)]
        how = "beside the last one" if beside else "after the last one"
        wrong = sum(one != other for one, other in zip(told, right, strict=True))
        found.check(f"groups: wrong digests and weights, received {how}", float(wrong), 0.0)
        rate = BUCKETS * groups.size / seconds / 1e9
        found.number(f"groups: loaded with digests, received {how}", rate, "GB/s")
