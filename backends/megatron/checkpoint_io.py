"""Megatron's distributed checkpoints, written by the ranks themselves.

Stock megatron-core writes through a spawned manager and forked children. A trainer has threads (engines, rollouts, gloo), where
a fork can deadlock, and the manager costs seconds at the first save; here each rank writes its own file, in the same format.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


def write_sharded(state: dict[str, Any], folder: Path) -> None:
    """Save a sharded state dict; every rank calls it, `folder` exists. Files are flushed, names in the folder are not."""
    with _local_results():
        dist_checkpointing.save(state, str(folder), sharded_strategy=_InProcess())


def read_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load what `write_sharded` saved into the shape of `state`, resharded; every rank calls it."""
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


class _InProcess(TorchDistSaveShardedStrategy):
    """`torch_dist` with one file a rank, written in this process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        return request._replace(async_fn=_write, async_fn_args=(writer,), preload_fn=None)


def _write(writer: filesystem_async.FileSystemWriterAsync) -> None:
    """What the stock writer does in children: each bucket to its file, fsync, and the results into the writer's queue."""
    if not writer.write_buckets:
        return
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    results: dict[int, Any] = {}
    for index, bucket in enumerate(writer.preload_tensors(writer.write_buckets)):
        done: queue.Queue[tuple[int, Any]] = queue.Queue()
        busy: queue.Queue[int] = queue.Queue()
        busy.put(index)
        writer.write_preloaded_data(transforms, index, bucket, done, busy, use_fsync=True)
        _, result = done.get_nowait()
        if isinstance(result, Exception):
            writer.results_queue.put(result)
            return
        results[index] = result
    writer.results_queue.put(results)


@contextmanager
def _local_results() -> Iterator[None]:
    """The stock writer asks for a queue of a spawned manager process; while this is open it gets a local one."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
