"""A second process that takes buckets by handle as an SGLang server does.

It opens a handle, queues its copies on the device's stream and answers. The copies can be made
late: behind a kernel that only waits on a GPU, at the end of the publication on a CPU.
"""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rlcore.weights import fingerprint
from rollout.weight_sync.tensor import DEVICE

ANSWER_S = 600.0  # the longest, with the start of the process; the section has its own limit
WAITING_CYCLES = 40_000_000  # of the GPU's clock, about 20 ms


class ReaderProcess:
    """The process, and the engine that `TensorTransport` sees in it.

    Args:
        gpu: its name, as in CUDA_VISIBLE_DEVICES.
    """

    name = "reader"
    group_ranks = 1

    def __init__(self, gpu: str, device: str) -> None:
        self.gpus = (gpu,)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()

    async def receive_serialized(self, index: int, payloads: list[str]) -> None:
        [payload] = payloads
        await asyncio.to_thread(self.ask, "take", index, payload)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `Reader` in the process."""
        self._connection.send((method, arguments))
        if not self._connection.poll(ANSWER_S):
            raise TimeoutError(f"the reader did not answer {method} within {ANSWER_S:.0f} s")
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Reader:
    """Loads buckets into weights of its own."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._weights: dict[int, Tensor] = {}
        self._late = False
        self._holds = False
        self._held: list[Tensor] = []
        self._queued: list[Callable[[], None]] = []  # copies that are late on a CPU

    def begin(self, late: bool, holds: bool) -> None:
        """Forget the weights. `holds`: handles stay open until the end of the publication."""
        for own in self._weights.values():
            own.zero_()
        self._late = late
        self._holds = holds

    def take(self, index: int, payload: str) -> None:
        """Queue the copies of a bucket."""
        content = pickle.loads(base64.b64decode(payload))
        flat = content["flattened_tensor"]
        spans = [slice(spec.start_idx, spec.end_idx) for spec in content["metadata"]]
        own = self._weights.setdefault(index, torch.zeros_like(flat))

        def copy() -> None:
            for span in spans:
                own[span].copy_(flat[span])

        if self._late and not self._on_gpu:
            self._queued.append(copy)
        else:
            if self._late:
                torch.cuda._sleep(WAITING_CYCLES)
            copy()
        if self._holds:
            self._held.append(flat)

    def complete(self) -> None:
        """Wait for the copies, and close the handles."""
        for copy in self._queued:
            copy()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._queued.clear()
        self._held.clear()

    def fingerprints(self) -> dict[int, str]:
        """Of the bytes of each bucket."""
        return {index: fingerprint(own) for index, own in self._weights.items()}


def _serve(connection: Connection, device: str) -> None:
    _find_gpus_by_identity()
    reader = Reader(device)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(reader, method)(*arguments))


def _find_gpus_by_identity() -> None:
    """Let handles name the GPU by its uuid, as SGLang does (sglang/srt/utils/patch_torch.py)."""
    rebuild = reductions.rebuild_cuda_tensor

    def rebuild_there(*arguments: Any) -> Tensor:
        number = _number_of(arguments[DEVICE])
        return rebuild(*arguments[:DEVICE], number, *arguments[DEVICE + 1 :])

    reductions.rebuild_cuda_tensor = rebuild_there


def _number_of(uuid: str) -> int:
    known = [
        str(torch.cuda.get_device_properties(number).uuid)
        for number in range(torch.cuda.device_count())
    ]
    return known.index(uuid)
