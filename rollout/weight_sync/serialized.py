"""SGLang engines on the trainer's host take each bucket from the body of a request.

On CUDA the body holds IPC handles, and the bytes go from GPU memory to GPU memory; this has never
been run. On the CPU it holds the bytes themselves. Either way the server unpickles the body, and
accepts only classes on a list; those used here are on it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rlcore.weights import Bucket
from rollout.weight_sync.base import Engine, Failures, Transport, ask

# the index of the device among the arguments of torch's `rebuild_cuda_tensor`
DEVICE = 6


class TensorTransport(Transport):
    """Puts the weights into the body of a request.

    `engine.receive_serialized(index, payloads)` loads bucket `index`, with one payload for each of
    its `group_ranks` tensor-parallel ranks. Its `health` has "cpu" or "cuda" under `device`.

    Args:
        timeout_s: for one bucket (`rollout.engine.update_timeout_s`).
        probe_s: for an answer to /health (`rollout.engine.health_timeout_s`).
    """

    name = "tensor"

    def __init__(self, *, timeout_s: float, probe_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._probe_s = probe_s
        self._by_handle = False

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        """Ask the engines for their devices."""
        answers = await ask(engines, "health", lambda e: e.health(), self._probe_s)
        self._by_handle = all(health["device"] == "cuda" for health in answers.results.values())
        self._engines = list(engines)
        return answers.failed

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        """Send every engine its payloads."""
        payloads = await asyncio.to_thread(self._payloads, bucket, flat)
        answers = await ask(
            self._engines,
            "receive_serialized",
            lambda e: e.receive_serialized(bucket.index, payloads[e]),
            self._timeout_s,
        )
        return answers.failed

    def _payloads(self, bucket: Bucket, flat: Tensor) -> dict[Engine, list[str]]:
        """Make the payloads of each engine.

        Bytes are packed once for all. A handle counts its readers, so each reader gets its own.
        """
        if flat.is_cuda and self._by_handle:
            # the readers do not wait for our stream
            torch.cuda.current_stream(flat.device).synchronize()
            return {
                engine: [by_handle(bucket, flat) for _ in range(engine.group_ranks)]
                for engine in self._engines
            }
        payload = by_value(bucket, flat)
        return {engine: [payload] * engine.group_ranks for engine in self._engines}


def by_value(bucket: Bucket, flat: Tensor) -> str:
    """Make a payload of the bytes themselves."""
    # A clone, since a view would be pickled with the whole of its storage.
    return encode(pickle.dumps(flattened(bucket, flat.detach().cpu().clone())))


def by_handle(bucket: Bucket, flat: Tensor) -> str:
    """Make a payload of an IPC handle. `flat` must live until the reader has answered."""
    buffer = io.BytesIO()
    HandlePickler(buffer).dump(flattened(bucket, flat.detach()))
    return encode(buffer.getvalue())


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

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])


def encode(data: bytes) -> str:
    """Base64, since payloads travel as JSON."""
    return base64.b64encode(data).decode()
