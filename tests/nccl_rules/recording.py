"""What the real exporter enqueues for each bucket, in its order, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

Op = list[Any]
"""One of

    ["announce", waits]             rank 0 announces a bucket, and another rank waits for that
    ["allocate"]                    a buffer grows
    ["batch", number, transfers]    sends and receives, each ["isend" | "irecv", peer]
    ["wait", number]                the current stream waits for that batch
    ["broadcast"]                   to all ranks of the trainer
"""


@dataclass
class RankOrder:
    """What a rank does for each bucket, and after the last one.

    Attributes:
        prefetches: it does so for the next bucket before it sends one.
    """

    prefetches: bool
    buckets: list[list[Op]] = field(default_factory=list)
    end: list[Op] = field(default_factory=list)


def broadcasts_of(world: int, buckets: int) -> list[RankOrder]:
    """The order of ranks that broadcast each bucket once rank 0 has announced it."""
    return [
        RankOrder(
            True,
            [
                [*([["announce", True]] if rank and index else []), ["broadcast"],
                 *([["announce", False]] if not rank else [])]
                for index in range(buckets)
            ],
        )
        for rank in range(world)
    ]  # fmt: skip


class Recorded:
    """The works of a batch, of which the first stands for all."""

    def __init__(self, wait: Callable[[], Any], note: Callable[[], None]) -> None:
        self._wait = wait
        self._note = note

    def wait(self) -> None:
        self._wait()
        self._note()


class Recorder:
    """Stands for torch.distributed in an exporter's module."""

    def __init__(self, exporter: Any) -> None:
        self.ops: list[Op] = []
        self._exporter = exporter
        self._batches = 0
        self._sizes: dict[Any, int] = {}
        self._buffer = exporter._buffer

    def broadcast(self, tensor: Tensor, root: int, **given: Any) -> Any:
        if given.get("group") is not self._exporter.parallel.control_group:
            self.ops.append(["broadcast"])
            return dist.broadcast(tensor, root, **given)
        self.ops.append(["announce", not given["async_op"]])
        return dist.broadcast(tensor, root, **given)

    def batch_isend_irecv(self, transfers: list[dist.P2POp]) -> list[Recorded]:
        number = self._batches
        self._batches += 1
        named = [[one.op.__name__, one.peer] for one in transfers]
        self.ops.append(["batch", number, named])
        first, *others = dist.batch_isend_irecv(transfers)
        waits = [Recorded(first.wait, lambda: self.ops.append(["wait", number]))]
        return waits + [Recorded(other.wait, lambda: None) for other in others]

    def buffer(self, kind: str, key: int, size: int) -> Tensor:
        if size > self._sizes.get((kind, key), -1):
            self._sizes[kind, key] = size
            self.ops.append(["allocate"])
        return self._buffer(kind, key, size)  # type: ignore[no-any-return]

    def take(self) -> list[Op]:
        ops = self.ops
        self.ops = []
        return ops


def record(module: Any, exporter: Any, *, everywhere: bool) -> RankOrder:
    """Export with the real exporter, and return what this rank did. Collective.

    Args:
        module: the exporter's module.
    """
    recorder = Recorder(exporter)
    order = RankOrder(False)
    stand_in = SimpleNamespace(**{**vars(dist), "broadcast": recorder.broadcast,
                                  "batch_isend_irecv": recorder.batch_isend_irecv})  # fmt: skip

    def prefetched(make: Callable[[Any], Any], items: Any, device: Any) -> Iterator[Any]:
        order.prefetches = True
        for item in items:
            made = make(item)
            order.buckets.append(recorder.take())
            yield made

    exporter.free_buffers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dist", stand_in)
        patch.setattr(module, "prefetched", prefetched)
        # Not kept: the exporter must go before its process group does.
        patch.setitem(vars(exporter), "_buffer", recorder.buffer)
        for _ in exporter.export_buckets(everywhere=everywhere):
            if not order.prefetches:
                order.buckets.append(recorder.take())
    order.end = recorder.take()
    return order
