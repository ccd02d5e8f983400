"""SGLang engines on the trainer's host take each bucket from the body of a request.

To engines on the trainer's GPUs the body brings IPC handles, made by the rank on the engine's own
GPU, and the bytes go from memory to memory there; this has never been run. Else it holds the bytes
themselves. Either way the server unpickles the body, and
accepts only classes on a list; those used here are on it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
from collections.abc import Callable, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, Transport, ask, gpus_of

# the indices of the device and of the readers' counter, which are two values, among the arguments
# of torch's `rebuild_cuda_tensor`
DEVICE = 6
COUNTER = 11


class TensorTransport(Transport):
    """Puts the weights into the body of a request.

    `engine.receive_serialized(index, payloads)` loads bucket `index`, with one payload for each of
    its `group_ranks` tensor-parallel ranks. `engine.gpus` names their GPUs. If a rank of the
    trainer is on each of them, they take handles of that rank's memory, else rank 0's bytes.

    Args:
        timeout_s: for one bucket (`rollout.engine.update_timeout_s`).
    """

    name = "tensor"

    @property
    def by_handle(self) -> bool:
        """Whether a rank of the trainer is on each GPU of each engine."""
        known = all(len(gpus_of(engine)) == engine.group_ranks for engine in self._engines)
        gpus = {gpu for engine in self._engines for gpu in gpus_of(engine)}
        return known and bool(gpus) and gpus <= set(self.trainer_gpus)

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Send every engine the bytes, packed once for all."""
        payload = await asyncio.to_thread(by_value, bucket, flat)
        return await self._post(bucket, lambda engine: [payload] * engine.group_ranks)

    async def send_handles(self, bucket: Bucket, handles: Mapping[str, str]) -> Failures:
        """Send every tensor-parallel rank the handle of the memory on its own GPU."""
        return await self._post(
            bucket, lambda engine: [payload_of(handles[gpu]) for gpu in gpus_of(engine)]
        )

    async def _post(self, bucket: Bucket, payloads: Callable[[Engine], list[str]]) -> Failures:
        answers = await ask(
            self._engines,
            "receive_serialized",
            lambda e: e.receive_serialized(bucket.index, payloads(e)),
            self._timeout_s,
        )
        return answers.failed


class SerializedHandles:
    """Implements `rlcore.interfaces.BucketHandles`: CUDA IPC, and on the CPU the bytes themselves.

    A handle is used once: torch counts its readers, and frees the memory when the count is zero. A
    reader's count ends after its own stream has, so what it reads is not overwritten before. (An
    engine's answer says only that its copies are queued.)
    """

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self._on_cuda = False

    def make(self, bucket: Bucket, flat: Tensor) -> str:
        """See `BucketHandles.make`."""
        self._on_cuda = flat.is_cuda
        if not flat.is_cuda:
            return json.dumps({"payload": by_value(bucket, flat), "counter": None})
        own = flat.detach().clone()
        # the reader does not wait for our stream
        torch.cuda.current_stream(own.device).synchronize()
        payload, (name, offset) = by_handle(bucket, own)
        return json.dumps({"payload": payload, "counter": [encode(name), offset]})

    def release(self, handle: str) -> None:
        """See `BucketHandles.release`. No effect on a handle that was read."""
        if (counter := json.loads(handle)["counter"]) is not None:
            name, offset = counter
            torch.UntypedStorage._release_ipc_counter_cuda(base64.b64decode(name), offset)

    def collect(self) -> None:
        """See `BucketHandles.collect`."""
        if self._on_cuda:
            torch.cuda.ipc_collect()


def payload_of(handle: str) -> str:
    """The payload in a handle of `SerializedHandles`."""
    return str(json.loads(handle)["payload"])


def by_value(bucket: Bucket, flat: Tensor) -> str:
    """Make a payload of the bytes themselves."""
    # A clone, since a view would be pickled with the whole of its storage.
    return encode(pickle.dumps(flattened(bucket, flat.detach().cpu().clone())))


def by_handle(bucket: Bucket, flat: Tensor) -> tuple[str, tuple[bytes, int]]:
    """Make a payload of an IPC handle, for one reader. Returns it and the name of its counter."""
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
    """Pickles tensors as CUDA IPC handles, with the GPU's uuid in place of its number.

    Trainer and engine may number the GPUs differently.
    """

    counter: tuple[bytes, int]  # where torch counts the readers of the tensor: file and offset

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
