"""A publication by handle to a process on the same GPU, and one whose reader is late.

The exporter fills two buffers in turn, and an engine answers when its copies are queued. A handle
of such a buffer would give a late reader the bytes of a later bucket. So `SerializedSender` makes
handles of memory of its own; both ways are tried with a reader that is late.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from one_gpu.handle_reader import ReaderProcess
from one_gpu.section import Found, Setting
from one_gpu.step import Trainer, random_trainer
from torch import Tensor

from rlcore.interfaces import RankAddress
from rlcore.launch.engines import visible_names
from rlcore.weights import Bucket, fingerprint
from rollout.weight_sync.tensor import (
    SerializedSender,
    TensorTransport,
    by_handle,
    encode,
    flattened,
)

LIMIT_S = 600.0  # of a bucket; the section has its own limit
TOY_BUCKET = 1 << 16  # bytes: several buckets of the toy model
LEFT = 0.01  # of the bytes of a publication that may stay allocated after it


class SharedBuffers(SerializedSender):
    """Makes handles of the buckets' own memory, without the copy: the naive way."""

    def pack(self, bucket: Bucket, flat: Tensor) -> str:
        """Return a handle of the bucket itself."""
        self._on_cuda = flat.is_cuda
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
            payload, _ = by_handle(bucket, flat.detach())
        else:
            payload = encode(ForkingPickler.dumps(flattened(bucket, flat.detach())))
        return json.dumps({"payload": payload, "counter": None})


class Publications:
    """Publications of a trainer's weights to the reader, as a run makes them."""

    def __init__(self, made: Trainer, reader: ReaderProcess) -> None:
        self._made = made
        self._reader = reader
        self._expected = {
            bucket.index: fingerprint(flat)
            for bucket, flat in made.backend.export_buckets()
            if flat is not None
        }
        self.num_bytes = sum(bucket.num_bytes for bucket in made.backend.buckets())

    def run(self, maker: SerializedSender, *, late: bool = False, holds: bool = True) -> float:
        """Make one publication. Returns its seconds, to the reader's last copy."""
        self._reader.ask("begin", late, holds)
        began = time.perf_counter()
        asyncio.run(self._publish(maker))
        return time.perf_counter() - began

    def wrong(self) -> int:
        """The buckets of which the reader has other bytes."""
        told = self._reader.ask("fingerprints")
        return sum(told[index] != known for index, known in self._expected.items())

    async def _publish(self, maker: SerializedSender) -> None:
        transport = TensorTransport(timeout_s=LIMIT_S)
        [gpu] = self._reader.gpus
        transport.ranks = [RankAddress("here", gpu, gpu)]
        buckets = self._made.backend.buckets()
        await transport.open([self._reader], buckets)
        orders = transport.orders()
        assert orders.gathers
        maker.open(orders.ranks[0], buckets)
        for bucket, flat in self._made.backend.export_buckets(everywhere=True):
            assert flat is not None
            if failed := await transport.send(bucket.index, {0: maker.pack(bucket, flat)}):
                raise RuntimeError(f"bucket {bucket.index}: {'; '.join(failed.values())}")
        self._reader.ask("complete")
        maker.end(done=True, stopped=None)


def publish_by_handle(setting: Setting) -> Found:
    """Publish in time and to a late reader: right bytes, how fast, and what stays allocated."""
    found = Found()
    # torch names the memory of a CPU tensor by a file; the other way needs an open connection
    torch.multiprocessing.set_sharing_strategy("file_system")
    with _publications(setting) as publications:
        ours, naive = SerializedSender(), SharedBuffers()
        publications.run(ours)  # takes the exporter's buffers and the reader's weights
        before = _allocated(setting)
        for label, maker in (("by handle", ours), ("by handle of the buffers", naive)):
            seconds = publications.run(maker)
            rate = publications.num_bytes / seconds / 1e9
            found.number(f"publication {label}", rate, "GB/s", f"{seconds:.3g} s")
            if maker is ours:
                wrong = publications.wrong()
                found.check("publication by handle: wrong buckets", float(wrong), 0.0)
                left = (_allocated(setting) - before) / publications.num_bytes
                found.check("publication by handle: share of its memory that stays", left, LEFT)
        _try_the_race(publications, ours, naive, found)
    return found


def _try_the_race(
    publications: Publications, ours: SerializedSender, naive: SerializedSender, found: Found
) -> None:
    """Publish to a reader whose copies run after the exporter's next ones."""
    for holds, reader in ((True, "late reader"), (False, "late reader that closes at once")):
        wrong = {}
        for label, maker in (("memory of its own", ours), ("the buffers", naive)):
            publications.run(maker, late=True, holds=holds)
            wrong[label] = publications.wrong()
            found.number(f"{reader}, {label}", wrong[label], "buckets", "are wrong")
        found.check(f"{reader}: wrong buckets", float(wrong["memory of its own"]), 0.0)
        if holds:  # torch waits for the copies before it closes a handle
            met = wrong["the buffers"] > 0
            found.check(f"{reader}: the race was not met by handles of buffers", float(not met), 0)


@contextmanager
def _publications(setting: Setting) -> Iterator[Publications]:
    engine: dict[str, Any] = {"transport": "tensor"}
    if setting.toy:
        engine["bucket_bytes"] = TOY_BUCKET
    [gpu] = visible_names([0], os.environ)
    reader = ReaderProcess(gpu, setting.device)
    try:
        with random_trainer(setting, "0.5B", engine=engine) as made:
            yield Publications(made, reader)
    finally:
        reader.close()


def _allocated(setting: Setting) -> int:
    return torch.cuda.memory_allocated() if setting.cuda else 0
