"""Has SGLang's schedulers receive a bucket while the GPU loads the one before it.

NCCL begins a broadcast when the stream from which it was called has done all that came before:
with SGLang's own stream the digest of a bucket and its copies into the weights, while the network
is idle. Here it is called from a stream for receiving alone. Nothing changes on the CPU.

Runs in the engines' environment, which does not have rlcore: it imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def install() -> None:
    """Wrap a method of this process."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    receive = WeightUpdater._receive_bucketed_weights_from_distributed
    streams: dict[str, ReceivingStream] = {}  # by device

    def receive_beside(self: Any, **given: Any) -> NamedTensors:
        if self.device not in streams:
            streams[self.device] = ReceivingStream(torch.device(self.device))
        return streams[self.device].receive(lambda: receive(self, **given))

    WeightUpdater._receive_bucketed_weights_from_distributed = receive_beside


class ReceivingStream:
    """A stream of a device for what is received there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def receive(self, receive: Callable[[], NamedTensors]) -> NamedTensors:
        """Call `receive` from the stream, and return the views of its one buffer.

        The caller's stream may use them from now on. Their memory is used again when all has run
        that it was given before the last view was dropped.
        """
        if self._stream is None:
            return receive()
        with torch.cuda.stream(self._stream):
            tensors = receive()
        loading = torch.cuda.current_stream(self._stream.device)
        loading.wait_stream(self._stream)
        tensors[0][1].record_stream(loading)
        return tensors
