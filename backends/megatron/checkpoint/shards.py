"""Megatron's distributed checkpoints, written by the ranks themselves.

Stock megatron-core writes through a spawned manager and forked children. A trainer has threads
(engines, rollouts, gloo), so a fork can deadlock, and the manager costs seconds at the first save.
Here each rank writes its own file in the same format: immediately, or in a thread from a copy in
host memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
import torch.distributed as dist
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
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from backends.megatron.checkpoint.pickles import check_metadata, checking_objects
from backends.megatron.checkpoint.pieces import reading_in_pieces
from backends.megatron.cpu.shim import replaced
from backends.megatron.parallel.state import ParallelState
from rlcore.deadlines import CHECKPOINT_TENSOR_S
from rlcore.errors import FailedElsewhere, ModelError, RlcoreError, RunFailed

# A file: (path, name, (serialised objects, tensors)).
_Bucket = tuple[Path, str, tuple[Any, Any]]
# The stock function without its decorator, which stops the garbage collector of the whole process.
_write_bucket = filesystem_async.FileSystemWriterAsync.write_preloaded_data.__wrapped__  # type: ignore[attr-defined]
# The functions with which rank 0 alone writes common.pt, .metadata and metadata.json.
_WRITTEN_BY_RANK_0 = (
    (TorchCommonSaveStrategy, "save_common"),
    (filesystem_async.FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's way to save, with one file per rank, which remembers its first save.

    Rank 0 gathers a plan from each rank before a save, and the offsets in each file after it, which
    takes it seconds for a few ranks. Both are the same at the next save.
    """

    def __init__(self) -> None:
        # Megatron by itself reuses the third plan, if the second was like the first.
        super().__init__("torch_dist", 1, thread_count=1, cached_metadata=True)
        self._own_offsets: Any = None
        # On rank 0: of all ranks.
        self._offsets: Any = None

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        storage_writer, metadata, wrapper = save_state_dict_ret
        if metadata is not None:
            self.cached_global_metadata = metadata
        self.validated_cache_reuse = True
        planned = (storage_writer, self.cached_global_metadata, wrapper)
        request = super()._get_save_and_finalize_callbacks(writer, planned)
        request.finalize_fns[:] = [partial(self._finalize, *planned)]
        return request

    def _finalize(self, writer: Any, metadata: Any, wrapper: Any) -> None:
        """Write the metadata, after every rank has written."""
        own = writer.retrieve_write_results()
        if _on_all_ranks(own == self._own_offsets):
            if wrapper.is_coordinator:
                writer.finish(metadata, self._offsets)
            return
        self._own_offsets = own
        finish = writer.finish

        def remember(metadata: Any, offsets: Any) -> None:
            self._offsets = offsets
            finish(metadata, offsets)

        with ExitStack() as patches:
            patches.enter_context(replaced(writer, "retrieve_write_results", lambda: own))
            patches.enter_context(replaced(writer, "finish", remember))
            save_state_dict_async_finalize(writer, metadata, wrapper)


def _on_all_ranks(condition: bool) -> bool:
    """Return whether a condition holds on all ranks. Collective."""
    holds = torch.tensor([condition], dtype=torch.int)
    dist.all_reduce(holds, op=dist.ReduceOp.MIN)
    return bool(holds)


class Plans:
    """The plans of a run's checkpoints, by model: its tensors are the same at each save."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, _Strategy]] = {}

    def strategy(self, model: str, state: Mapping[str, Any]) -> tuple[_Strategy, bool]:
        """Return how to save a model, and whether its plan exists. Collective."""
        structure = _structure(state)
        before, strategy = self._known.get(model, (b"", _Strategy()))
        # A rank may have got other tensors, or failed while it planned: all plan again, or none.
        is_known = _on_all_ranks(before == structure and strategy.validated_cache_reuse)
        if not is_known:
            strategy = _Strategy()
            self._known[model] = (structure, strategy)
        return strategy, is_known


def _structure(state: Mapping[str, Any]) -> bytes:
    """A digest of which part of which tensor each entry of a sharded state is."""
    digest = hashlib.sha256()
    for entry in nested_values(dict(state)):
        if isinstance(entry, ShardedTensor):
            place = (entry.global_offset, entry.axis_fragmentations, entry.replica_id)
            part = (entry.key, entry.dtype, entry.global_shape, entry.local_shape, *place)
            digest.update(repr(part).encode())
    return digest.digest()


def plan_sharded(
    state: dict[str, Any], folder: Path, host: HostCopies | None = None, plans: Plans | None = None
) -> PlannedShards:
    """Plan to save a sharded state dict into an existing folder. Collective.

    Args:
        host: memory to copy the tensors to; None: write them from their own memory.
        plans: keeps the plan for the next save of a folder with this name.
    """
    apply_factories(state)
    for entry in nested_values(state):
        if not isinstance(entry, ShardedTensor) or entry.data is None or not entry.data.is_cpu:
            continue
        tensor = entry.data = entry.data.detach().contiguous()
        # Megatron would copy all tensors that are parts of larger storages at the same time.
        if tensor.numel():
            # numpy would make the tensor's storage impossible to resize for offloading.
            buffer = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
            buffer.owner = tensor  # type: ignore[attr-defined]  # it lives as long as the buffer
            entry.data = torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
    strategy, is_known = (plans or Plans()).strategy(folder.name, state)
    # A queue of this process replaces the queue of a spawned manager process.
    local_results = replaced(filesystem_async, "_results_queue", queue.Queue())
    with local_results, _failures_of_rank_0_at_the_end():
        request = dist_checkpointing.save(
            state,
            str(folder),
            sharded_strategy=strategy,
            validate_access_integrity=not is_known,
            async_sharded_save=True,
        )
    assert request is not None
    return PlannedShards(request, folder.name, host)


def assign_to_replicas(weights: Mapping[str, Any], parallel: ParallelState) -> None:
    """Assign each weight of a sharded state to one of the replicas that hold it, in place.

    Megatron lets the first replica write all weights while the others wait. Here weights are
    assigned by size. Every rank computes the same assignment without communication, since replicas
    hold the same weights in the same order. Readers do not depend on the assignment.

    The last number of a `replica_id` is the data-parallel replica; replica 0 writes. Optimizer
    states that are not divided over replicas are assigned with their weight.
    """
    entries = sharded_entries(weights)
    experts = [entry for entry in entries if ".experts." in entry.key]
    others = [entry for entry in entries if ".experts." not in entry.key]
    for group, replicas in (
        (others, parallel.dp_size * parallel.cp_size),
        (experts, parallel.edp_size),
    ):
        written = [0] * replicas
        for entry in sorted(group, key=lambda entry: -entry.data.nbytes):
            writer = written.index(min(written))
            written[writer] += entry.data.nbytes
            *before, replica = entry.replica_id
            entry.replica_id = (*before, (replica - writer) % replicas)


def sharded_entries(weights: Mapping[str, Any]) -> list[ShardedTensor | ShardedTensorFactory]:
    """Return the entries of a model's sharded state that hold parameters, in order."""
    return [
        entry
        for entry in nested_values(dict(weights))
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    ]


def read_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load a checkpoint of `PlannedShards`, resharded to `state`. Collective.

    Tensors are read into the memory of `state`.
    """
    check_metadata(folder)
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensorFactory):
            entry.merge_fn = _unless_in_place(entry.data, entry.merge_fn)
    with checking_objects(folder), reading_in_pieces():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def _unless_in_place(whole: Tensor, merge: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Skip the merge if the parts were read into `whole`: Megatron would copy every parameter."""
    memory = whole.untyped_storage().data_ptr()

    def merged(parts: Any) -> Tensor:
        found = nested_values({"parts": parts})
        in_place = all(part.untyped_storage().data_ptr() == memory for part in found)
        return whole if in_place else merge(parts)

    return merged


class HostCopies:
    """Host memory for copies of tensors, pinned for tensors of a GPU, and reused by every save."""

    def __init__(self) -> None:
        self._tensors: dict[Any, Tensor] = {}
        self._copying: torch.device | None = None

    @torch.no_grad()
    def copy(self, key: Any, tensor: Tensor) -> Tensor:
        """Start a copy of `tensor`; `complete` waits for it.

        The next copy with the same `key` overwrites this one.
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
    """One model's part of a checkpoint. Call `write` on any thread, then `finish` on all ranks."""

    def __init__(self, request: AsyncRequest, model: str, host: HostCopies | None) -> None:
        self._finalize = request.finalize_fns
        self._bucket: _Bucket | None = None
        # This rank has nothing to write.
        if request.async_fn is None:
            return
        self._transforms = request.async_fn.args[0]
        _, (self._bucket,), self._results = request.async_fn_args
        if host is not None:
            path, name, (objects, tensors) = self._bucket
            tensors = [(item, host.copy((model, item.index), tensor)) for item, tensor in tensors]
            self._bucket = path, name, (objects, tensors)
            host.complete()

    def write(self, cancelled: threading.Event | None = None) -> None:
        """Write and flush this rank's file.

        Raises the disk's error, or RunFailed if `cancelled` is set between two tensors.
        """
        if self._bucket is None:
            return
        path, name, (objects, tensors) = self._bucket

        def on_host() -> Iterator[Any]:
            """Copy each tensor just before it is written, so that only one copy exists."""
            for item, tensor in tensors:
                if cancelled is not None and cancelled.is_set():
                    raise RunFailed(f"writing {path} was cancelled: the run ends")
                yield item, tensor.cpu()

        done: queue.Queue[tuple[int, Any]] = queue.Queue()
        busy: queue.Queue[int] = queue.Queue()
        busy.put(0)
        bucket = (path, name, (objects, on_host()))
        _write_bucket(self._transforms, 0, bucket, done, busy, use_fsync=True)
        _, result = done.get_nowait()
        if isinstance(result, Exception):
            raise result
        self._results.put({0: result})

    def finish(self) -> None:
        """Write the metadata. Collective; call after all ranks have written."""
        with _failures_of_rank_0_at_the_end():
            for step in self._finalize:
                step()


class PendingCheckpoint:
    """This rank's part of a checkpoint, written by a thread that the constructor starts.

    A thread is used rather than a process, since a fork can deadlock in a trainer with threads. The
    thread calls neither Megatron nor a collective, and releases the GIL during disk writes.
    """

    def __init__(
        self, folder: Path, planned: Sequence[PlannedShards], complete: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._planned = planned
        # Completes the checkpoint, once `written` has returned a number on every rank. Collective;
        # call inside `megatron_device`. Raises RunFailed naming folder and reason.
        self.finish = complete
        self._seconds: float | None = None
        self._failure: Exception | None = None
        self._cancelled = threading.Event()
        # A daemon thread: a disk that hangs must not keep the process alive.
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
        """The seconds that writing took; None while it is in progress.

        Raises RunFailed naming the folder and the reason.
        """
        if self._seconds is not None and self._failure is not None:
            raise self._failure
        return self._seconds

    def cancel(self) -> None:
        """Stop writing after the current tensor, and wait for the thread to end."""
        self._cancelled.set()
        self._thread.join(CHECKPOINT_TENSOR_S)


@contextmanager
def _failures_of_rank_0_at_the_end() -> Iterator[None]:
    """Delay errors of the functions in `_WRITTEN_BY_RANK_0` until the block ends.

    Megatron calls collectives after those functions, in which the other ranks would wait for rank
    0.
    """
    failures: list[Exception] = []

    def attempting(write: Callable[..., None]) -> Callable[..., None]:
        def attempt(*args: Any, **options: Any) -> None:
            try:
                write(*args, **options)
            # torch raises either for a disk error.
            except (OSError, RuntimeError) as error:
                failures.append(error)

        return attempt

    with ExitStack() as patches:
        for owner, name in _WRITTEN_BY_RANK_0:
            patches.enter_context(replaced(owner, name, attempting(getattr(owner, name))))
        yield
    if failures:
        raise failures[0]


# --- errors of torch, Megatron and the disk -------------------------------------------------------


@contextmanager
def read_errors(folder: Path) -> Iterator[None]:
    """Turn any error of reading into ModelError: a damaged file may cause any exception."""
    try:
        yield
    except RlcoreError:
        raise
    except (Exception, CheckpointException) as error:
        raise ModelError(f"checkpoint {folder}: cannot be loaded: {_first_cause(error)}") from error


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing into RunFailed, or FailedElsewhere if another rank failed."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        kind = FailedElsewhere if _is_bystander(error) else RunFailed
        raise kind(f"writing {folder}: {_first_cause(error)}") from error


def _is_bystander(error: BaseException) -> bool:
    """Whether torch only reports that another rank failed: only rank 0 receives the reason."""
    return isinstance(error, CheckpointException) and not error.failures


def _first_cause(error: BaseException) -> str:
    """The reason in one line.

    torch's CheckpointException carries a traceback of every rank, and its unpickler's error a page
    of advice.
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
