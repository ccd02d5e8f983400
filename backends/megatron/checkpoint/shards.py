"""Megatron's distributed checkpoints, written by the ranks themselves.

Stock megatron-core writes through a spawned manager and forked children. A trainer has threads
(engines, rollouts, gloo), where a fork can deadlock, and the manager costs seconds at the first
save; here each rank writes its own file, in the same format: at once, or from a copy in host memory
by a thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from rlcore.errors import RunFailed

# (path, name, (serialised objects, tensors)): what goes into one file.
_Bucket = tuple[Path, str, tuple[Any, Any]]
# The stock function, but for its decorator: that one stops the garbage collector of the whole
# process meanwhile.
_write_bucket = filesystem_async.FileSystemWriterAsync.write_preloaded_data.__wrapped__  # type: ignore[attr-defined]


def write_sharded(state: dict[str, Any], folder: Path) -> None:
    """Save a sharded state dict; every rank calls it, `folder` exists. Files are flushed, names in
    the folder are not.

    A rank that could not write raises what the disk raised, every other one CheckpointException:
        only rank 0's has the reason.
    """
    strategy = _InProcess()
    with _local_results():
        try:
            dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)
        except CheckpointException:
            if strategy.failure is not None:
                raise strategy.failure from None
            raise


def plan_sharded(state: dict[str, Any], folder: Path, host: HostCopies) -> PlannedShards:
    """As `write_sharded`, up to where the tensors would be written: they are copied into `host`,
    and training may go on.
    """
    with _local_results():
        request = dist_checkpointing.save(
            state, str(folder), sharded_strategy=_InProcess(), async_sharded_save=True
        )
    assert request is not None
    (writer,) = request.async_fn_args
    writer.write_buckets = [
        (
            path,
            name,
            (
                objects,
                [
                    (item, host.copy((str(folder.name), item.index), tensor))
                    for item, tensor in tensors
                ],
            ),
        )
        for path, name, (objects, tensors) in writer.write_buckets
    ]
    host.complete()
    return PlannedShards(writer, request.finalize_fns)


def read_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load what `write_sharded` saved into the shape of `state`, resharded; every rank calls it."""
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def saved_names(folder: Path) -> list[str]:
    """The names of all tensors that `write_sharded` saved."""
    return list(dist_checkpointing.load_tensors_metadata(str(folder)))


class HostCopies:
    """Host memory, pinned for what lies on a GPU, that tensors are copied into. Kept, so that every
    save uses the same.
    """

    def __init__(self) -> None:
        self._tensors: dict[Any, Tensor] = {}
        self._copying: torch.device | None = None

    @torch.no_grad()
    def copy(self, place: Any, tensor: Tensor) -> Tensor:
        """The copy of `tensor`, whole after `complete`; overwritten by the next one of the same
        `place`.
        """
        kept = self._tensors.get(place)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._tensors[place] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        if tensor.is_cuda:
            self._copying = tensor.device
        return kept.copy_(tensor, non_blocking=True)

    def complete(self) -> None:
        """Wait until every copy is whole."""
        if self._copying is not None:
            torch.cuda.current_stream(self._copying).synchronize()
            self._copying = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())


class PlannedShards:
    """One model's part of a checkpoint, whose tensors are in host memory: `write` on any thread,
    then `finish` on all ranks.
    """

    def __init__(self, writer: Any, finalize: Sequence[Callable[[], None]]) -> None:
        self._writer = writer
        self._finalize = finalize

    def write(self, cancelled: threading.Event) -> None:
        """Write and flush this rank's file. Raises what the disk raised, and RunFailed when
        `cancelled` between two tensors.
        """
        if not self._writer.write_buckets:
            return
        outcome = _write_buckets(
            self._writer, [_cancellable(bucket, cancelled) for bucket in self._writer.write_buckets]
        )
        if isinstance(outcome, Exception):
            raise outcome
        self._writer.results_queue.put(outcome)

    def finish(self) -> None:
        """Write what tells where everything is. Every rank calls it, after all of them have
        written.
        """
        for step in self._finalize:
            step()


class _InProcess(TorchDistSaveShardedStrategy):
    """`torch_dist` with one file a rank, written in this process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.failure: Exception | None = None  # of this rank

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        return request._replace(async_fn=self._write, async_fn_args=(writer,), preload_fn=None)

    def _write(self, writer: Any) -> None:
        """What the stock writer does in children: its results, or the error, go into the writer's
        queue.
        """
        if writer.write_buckets:
            outcome = _write_buckets(writer, writer.preload_tensors(writer.write_buckets))
            self.failure = outcome if isinstance(outcome, Exception) else None
            writer.results_queue.put(outcome)


def _write_buckets(writer: Any, buckets: Sequence[_Bucket]) -> dict[int, Any] | Exception:
    """Each bucket to its file, flushed: the results by bucket, or the first error."""
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    results: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        done: queue.Queue[tuple[int, Any]] = queue.Queue()
        busy: queue.Queue[int] = queue.Queue()
        busy.put(index)
        _write_bucket(transforms, index, bucket, done, busy, use_fsync=True)
        _, result = done.get_nowait()
        if isinstance(result, Exception):
            return result
        results[index] = result
    return results


def _cancellable(bucket: _Bucket, cancelled: threading.Event) -> _Bucket:
    path, name, (objects, tensors) = bucket

    def until_cancelled() -> Iterator[Any]:
        for each in tensors:
            if cancelled.is_set():
                raise RunFailed(f"writing {path} was given up: the run ends")
            yield each

    return path, name, (objects, until_cancelled())


@contextmanager
def _local_results() -> Iterator[None]:
    """The stock writer asks for a queue of a spawned manager process; while this is open it gets a
    local one.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before
