"""SGLang engines on the trainer's GPUs take each bucket from the body of a request.

For engines on the trainer's GPUs the body holds IPC handles, made by the rank on the engine's own
GPU, and the bytes are copied from memory to memory there; this has never been run. Otherwise the
body holds the bytes themselves. The server unpickles the body and accepts only classes on a list;
the classes used here are on it.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rlcore.interfaces import BucketSender, Orders
from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, Transport, ask, gpus_of

# Indices among the arguments of torch's `rebuild_cuda_tensor`. The readers' counter has two values.
DEVICE = 6
COUNTER = 11
# Orders for the ranks.
BYTES = "bytes"
HANDLE = "handle"


class TensorTransport(Transport):
    """Puts the weights into the body of a request.

    `engine.receive_serialized(index, payloads)` loads bucket `index`, with one payload for each of
    its `group_ranks` tensor-parallel ranks. `engine.gpus` names their GPUs. If the trainer has a
    rank on each of these GPUs, the engine takes handles of that rank's memory, otherwise rank 0's
    bytes.

    Args:
        timeout_s: the limit for one bucket (`rollout.engine.update_timeout_s`).
    """

    name = "tensor"

    def orders(self) -> Orders:
        """Have a rank on each GPU send handles if engines take them, otherwise rank 0 the bytes."""
        owners = self._owners()
        if not owners:
            return Orders(self.name, {0: BYTES})
        return Orders(self.name, dict.fromkeys(sorted(set(owners.values())), HANDLE), gathers=True)

    def _owners(self) -> dict[str, int]:
        """The first rank on each engine's GPUs; {} if a GPU is unknown or has no rank."""
        first: dict[str, int] = {}
        for rank, address in enumerate(self.ranks):
            if address.name is not None:
                first.setdefault(address.name, rank)
        known = all(len(gpus_of(engine)) == engine.group_ranks for engine in self._engines)
        gpus = {gpu for engine in self._engines for gpu in gpus_of(engine)}
        if not known or not gpus <= first.keys():
            return {}
        return {gpu: first[gpu] for gpu in gpus}

    async def send(self, index: int, packed: Mapping[int, str]) -> Failures:
        """Send every tensor-parallel rank the handle of the memory on its own GPU, or the bytes."""
        owners = self._owners()

        def payloads(engine: Engine) -> list[str]:
            if not owners:
                return [packed[0]] * engine.group_ranks
            return [payload_of(packed[owners[gpu]]) for gpu in gpus_of(engine)]

        answers = await ask(
            self._engines,
            "receive_serialized",
            lambda e: e.receive_serialized(index, payloads(e)),
            self._timeout_s,
        )
        # Failed engines have ended and read nothing.
        self._engines = [engine for engine in self._engines if engine not in answers.failed]
        return answers.failed

    def stop(self) -> list[int]:
        """Return the ranks whose last handles engines still read."""
        return sorted(set(self._owners().values()))

    async def complete(self, result: Any) -> Failures:
        """Do nothing: `send` has waited for the engines."""
        return {}


class SerializedSender(BucketSender):
    """Packs a bucket as a CUDA IPC handle, or as the bytes themselves.

    A handle is used once: torch counts its readers, and frees the memory when the count is zero. A
    reader is counted until its own stream has finished, so the memory is not overwritten before.
    (An engine's answer only means that its copies are queued.) The ranks do not wait for rank 0,
    and may be a bucket ahead of it.
    """

    def __init__(self) -> None:
        self._by_handle = False
        self._on_cuda = False

    def open(self, order: str, buckets: Sequence[Bucket]) -> None:
        """Begin a publication; `order` is BYTES or HANDLE."""
        self._by_handle = order == HANDLE

    def pack(self, bucket: Bucket, flat: Tensor) -> str:
        """Return the payload, or copy the bucket into new memory and return its handle."""
        if not self._by_handle:
            return by_value(bucket, flat)
        self._on_cuda = flat.is_cuda
        if not flat.is_cuda:
            return json.dumps({"payload": by_value(bucket, flat), "counter": None})
        own = flat.detach().clone()
        # The reader does not wait for our stream.
        torch.cuda.current_stream(own.device).synchronize()
        payload, (name, offset) = by_handle(bucket, own)
        return json.dumps({"payload": payload, "counter": [encode(name), offset]})

    def discard(self, packed: Mapping[int, str], stopped: Sequence[int] | None) -> None:
        """Free the memory of unread handles, except those of the ranks in `stopped`."""
        for rank, handle in packed.items():
            if rank in (stopped or ()):
                continue
            if (counter := json.loads(handle)["counter"]) is not None:
                name, offset = counter
                torch.UntypedStorage._release_ipc_counter_cuda(base64.b64decode(name), offset)

    def end(self, *, done: bool, stopped: Any) -> None:
        """Free the memory that readers have closed."""
        if self._on_cuda:
            torch.cuda.ipc_collect()


def payload_of(handle: str) -> str:
    """The payload in a handle of `SerializedSender`."""
    return str(json.loads(handle)["payload"])


def by_value(bucket: Bucket, flat: Tensor) -> str:
    """Make a payload of the bytes themselves."""
    # A clone, since a view would be pickled with the whole of its storage.
    return encode(pickle.dumps(flattened(bucket, flat.detach().cpu().clone())))


def by_handle(bucket: Bucket, flat: Tensor) -> tuple[str, tuple[bytes, int]]:
    """Make a payload of an IPC handle for one reader. Returns the payload and its counter."""
    buffer = io.BytesIO()
    pickler = HandlePickler(buffer)
    pickler.dump(flattened(bucket, flat))
    return encode(buffer.getvalue()), pickler.counter


def flattened(bucket: Bucket, flat: Tensor) -> dict[str, Any]:
    """Make an object like SGLang's `flattened_bucket`.

    The server reads the attributes of the metadata, not their class.
    """
    ends = accumulate(spec.num_bytes for spec in bucket.tensors)
    metadata = [
        SimpleNamespace(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=spec.torch_dtype,
            start_idx=end - spec.num_bytes,
            end_idx=end,
            numel=spec.num_bytes,
        )
        for spec, end in zip(bucket.tensors, ends)
    ]
    return {"flattened_tensor": flat, "metadata": metadata}


class HandlePickler(pickle.Pickler):
    """Pickles tensors as CUDA IPC handles, with the GPU's UUID instead of its number.

    Trainer and engine may number the GPUs differently.
    """

    counter: tuple[bytes, int]  # file and offset of torch's count of the tensor's readers

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        self.counter = arguments[COUNTER : COUNTER + 2]
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])


def encode(data: bytes) -> str:
    """Base64, since payloads travel as JSON."""
    return base64.b64encode(data).decode()
