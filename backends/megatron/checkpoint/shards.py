"""Megatron's distributed checkpoints, written by the ranks themselves.

Stock megatron-core writes through a spawned manager and forked children. A trainer has threads
(engines, rollouts, gloo), where a fork can deadlock, and the manager costs seconds at the first
save. Here each rank writes its own file, in the same format: at once, or in a thread from a copy in
host memory.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from backends.megatron.checkpoint.pickles import check_metadata, checking_objects
from backends.megatron.checkpoint.pieces import reading_in_pieces
from rlcore.deadlines import CHECKPOINT_TENSOR_S
from rlcore.errors import FailedElsewhere, ModelError, RlcoreError, RunFailed

# the contents of one file: (path, name, (serialised objects, tensors))
_Bucket = tuple[Path, str, tuple[Any, Any]]
# The stock function without its decorator, which stops the garbage collector of the whole process.
_write_bucket = filesystem_async.FileSystemWriterAsync.write_preloaded_data.__wrapped__  # type: ignore[attr-defined]
# What rank 0 alone writes: common.pt, .metadata and metadata.json.
_WRITTEN_BY_RANK_0 = (
    (TorchCommonSaveStrategy, "save_common"),
    (filesystem_async.FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)


def write_sharded(state: dict[str, Any], folder: Path) -> None:
    """Save a sharded state dict into an existing folder; every rank calls it.

    Files are flushed, names in the folder are not. A rank that could not write raises the error of
    the disk. If that was its share of the tensors, every other rank raises CheckpointException, of
    which only rank 0's has the reason; if it was a file that rank 0 alone writes, none does.
    """
    strategy = _InProcess()
    _own_storages(state)
    with _local_results(), _failures_of_rank_0_at_the_end():
        try:
            dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)
        except CheckpointException:
            if strategy.failure is not None:
                raise strategy.failure from None
            raise


def plan_sharded(state: dict[str, Any], folder: Path, host: HostCopies) -> PlannedShards:
    """As `write_sharded`, but copy the tensors into `host` instead of writing them."""
    _own_storages(state)
    with _local_results(), _failures_of_rank_0_at_the_end():
        request = dist_checkpointing.save(
            state, str(folder), sharded_strategy=_InProcess(), async_sharded_save=True
        )
    assert request is not None
    (writer,) = request.async_fn_args
    buckets = []
    for path, name, (objects, tensors) in writer.write_buckets:
        copies = [(item, host.copy((folder.name, item.index), tensor)) for item, tensor in tensors]
        buckets.append((path, name, (objects, copies)))
    writer.write_buckets = buckets
    host.complete()
    return PlannedShards(writer, request.finalize_fns)


def _own_storages(state: dict[str, Any]) -> None:
    """Replace each tensor on the CPU by one with a storage of its own over the same memory.

    Megatron copies, all of them at once, what is a part of a larger storage.
    """
    apply_factories(state)
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor) and entry.data is not None and entry.data.is_cpu:
            entry.data = _over_same_memory(entry.data.detach().contiguous())


def _over_same_memory(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return tensor
    # Not by numpy, which would make the tensor's storage one that cannot be offloaded any more.
    buffer = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    buffer.owner = tensor  # type: ignore[attr-defined]  # it lives as long as the buffer
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)


def read_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load a checkpoint of `write_sharded`, resharded to `state`; every rank calls it.

    Tensors are read into the memory that `state` has for them.
    """
    check_metadata(folder)
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensorFactory):
            entry.merge_fn = _unless_in_place(entry.data, entry.merge_fn)
    with checking_objects(folder), reading_in_pieces():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def _unless_in_place(whole: Tensor, merge: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Merge nothing that was read into `whole`: Megatron would copy the parts of all parameters."""
    memory = whole.untyped_storage().data_ptr()

    def merged(parts: Any) -> Tensor:
        found = nested_values({"parts": parts})
        in_place = all(part.untyped_storage().data_ptr() == memory for part in found)
        return whole if in_place else merge(parts)

    return merged


def saved_names(folder: Path) -> list[str]:
    """The names of all tensors that `write_sharded` saved."""
    check_metadata(folder)
    return list(dist_checkpointing.load_tensors_metadata(str(folder)))


class HostCopies:
    """Host memory for copies of tensors, pinned for those of a GPU, and reused by every save."""

    def __init__(self) -> None:
        self._tensors: dict[Any, Tensor] = {}
        self._copying: torch.device | None = None

    @torch.no_grad()
    def copy(self, key: Any, tensor: Tensor) -> Tensor:
        """Start a copy of `tensor`, which is complete after `complete`.

        The next copy with the same `key` overwrites it.
        """
        host = self._tensors.get(key)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._tensors[key] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        if tensor.is_cuda:
            self._copying = tensor.device
        return host.copy_(tensor, non_blocking=True)

    def complete(self) -> None:
        """Wait until every copy is complete."""
        if self._copying is not None:
            torch.cuda.current_stream(self._copying).synchronize()
            self._copying = None


class PlannedShards:
    """One model's part of a checkpoint, whose tensors are in host memory.

    Call `write` on any thread, then `finish` on all ranks.
    """

    def __init__(self, writer: Any, finalize: Sequence[Callable[[], None]]) -> None:
        self._writer = writer
        self._finalize = finalize

    def write(self, cancelled: threading.Event) -> None:
        """Write and flush this rank's file.

        Raises the error of the disk, and RunFailed when `cancelled` is set between two tensors.
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
        """Write the metadata. Every rank calls it, after all ranks have written."""
        with _failures_of_rank_0_at_the_end():
            for step in self._finalize:
                step()


class PendingCheckpoint:
    """This rank's part of a checkpoint, written by a thread that starts here.

    It is a thread and no process, since a fork can deadlock in a trainer with threads. It calls
    neither Megatron nor a collective, and releases the interpreter while the disk works.
    `complete` is called by `finish`.
    """

    def __init__(
        self, folder: Path, planned: Sequence[PlannedShards], complete: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._planned = planned
        self._complete = complete
        self._seconds: float | None = None
        self._failure: Exception | None = None
        self._cancelled = threading.Event()
        # A daemon: a disk that hangs must not keep the process.
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        began = time.perf_counter()
        try:
            with write_errors(self._folder):
                for part in self._planned:
                    part.write(self._cancelled)
        except Exception as error:  # noqa: BLE001  # raised by `written`, on the thread that asks
            self._failure = error
        self._seconds = time.perf_counter() - began

    def written(self) -> float | None:
        """The seconds that the writing took; None while it goes on.

        Raises RunFailed naming the folder and the reason.
        """
        if self._seconds is not None and self._failure is not None:
            raise self._failure
        return self._seconds

    def finish(self) -> None:
        """Complete the checkpoint, when `written` has returned a number on every rank.

        Collective; call inside `megatron_device`. Raises RunFailed naming folder and reason.
        """
        self._complete()

    def cancel(self) -> None:
        """Stop writing after the current tensor, and wait for that."""
        self._cancelled.set()
        self._thread.join(CHECKPOINT_TENSOR_S)


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
        """Write in this process, where the stock writer forks.

        The results, or the error, go into the writer's queue.
        """
        if writer.write_buckets:
            outcome = _write_buckets(writer, [_on_host(bucket) for bucket in writer.write_buckets])
            self.failure = outcome if isinstance(outcome, Exception) else None
            writer.results_queue.put(outcome)


def _write_buckets(writer: Any, buckets: Sequence[_Bucket]) -> dict[int, Any] | Exception:
    """Write and flush each bucket to its file; return the results by bucket, or the first error."""
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


def _on_host(bucket: _Bucket) -> _Bucket:
    """Copy each tensor to host memory when it is written, so that there is one copy at a time."""
    path, name, (objects, tensors) = bucket
    return path, name, (objects, ((item, tensor.cpu()) for item, tensor in tensors))


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
    """Inside, the stock writer gets a local queue instead of one of a spawned manager process."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


@contextmanager
def _failures_of_rank_0_at_the_end() -> Iterator[None]:
    """Raise what fails in `_WRITTEN_BY_RANK_0` when the block ends, and not at once.

    Megatron goes on with collectives there, in which the other ranks would wait for rank 0.
    """
    failures: list[Exception] = []
    with ExitStack() as patches:
        for owner, name in _WRITTEN_BY_RANK_0:
            patches.enter_context(_keeping_failures(owner, name, failures))
        yield
    if failures:
        raise failures[0]


@contextmanager
def _keeping_failures(owner: Any, name: str, failures: list[Exception]) -> Iterator[None]:
    """Inside, errors of the function `owner.name` go into `failures`."""
    write = getattr(owner, name)

    def attempt(*args: Any, **options: Any) -> None:
        try:
            write(*args, **options)
        except (OSError, RuntimeError) as error:  # torch raises both for a disk
            failures.append(error)

    setattr(owner, name, attempt)
    try:
        yield
    finally:
        setattr(owner, name, write)


# --- errors of torch, Megatron and the disk, as one line that names the checkpoint ----------------


@contextmanager
def read_errors(folder: Path) -> Iterator[None]:
    """Turn errors of reading into ModelError: a damaged file may make anything fail."""
    try:
        yield
    except RlcoreError:
        raise
    except (Exception, CheckpointException) as error:
        raise ModelError(f"checkpoint {folder}: cannot be loaded: {_first_cause(error)}") from error


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing into RunFailed, or FailedElsewhere if another rank has the reason."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        kind = FailedElsewhere if _is_bystander(error) else RunFailed
        raise kind(f"writing {folder}: {_first_cause(error)}") from error


def _is_bystander(error: BaseException) -> bool:
    """Whether torch only says that some rank failed: rank 0 alone receives the reason."""
    return isinstance(error, CheckpointException) and not error.failures


def _first_cause(error: BaseException) -> str:
    """The reason in one line.

    torch's CheckpointException carries a traceback of every rank, its unpickler a page of advice.
    """
    where = ""
    if _is_bystander(error):
        return "another rank failed; the log of rank 0 has the reason"
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        error = cause
        where = f" (rank {rank})"
    if isinstance(error, (UnpicklingError, EOFError, BadZipFile)):
        return f"a file holds other bytes than were written{where}"
    return f"{(str(error) or type(error).__name__).splitlines()[0]}{where}"
