"""Making the next thing while the last one is in use: in a thread on the CPU, on a stream of its
own on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def prefetched(make: Callable[[T], R], items: Sequence[T], device: torch.device) -> Iterator[R]:
    """`make(item)` of each item in order; the next is being made while the consumer has the last.

    `make` is called for one item after the other, without gradients. It must not overwrite the last
        thing that it made: that
    is the consumer's until the next is asked for. When the consumer stops early, the one begun is
    still made.
    """
    with _Stream(device) if device.type == "cuda" else _Thread() as maker:
        pending = maker.begin(make, items[0]) if items else None
        for following in items[1:]:
            assert pending is not None
            made = pending()
            pending = maker.begin(make, following)
            yield made
        if pending is not None:
            yield pending()


class _Maker(Protocol):
    def begin(self, make: Callable[[T], R], item: T) -> Callable[[], R]:
        """Start it; the function returned gives what was made."""
        ...


class _Thread:
    def __enter__(self) -> _Maker:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        return self

    def __exit__(self, *exception: object) -> None:
        self._worker.shutdown()

    def begin(self, make: Callable[[T], R], item: T) -> Callable[[], R]:
        def without_gradients() -> R:  # a thread begins with them
            with torch.no_grad():
                return make(item)

        future: Future[R] = self._worker.submit(without_gradients)
        return future.result


class _Stream:
    """Calls return when their kernels are queued. Both streams wait for each other on the device
    alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __enter__(self) -> _Maker:
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def begin(self, make: Callable[[T], R], item: T) -> Callable[[], R]:
        # The consumer's stream: the weights are what its last step made, and the memory to write to
        # is no longer read there.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            made = make(item)
            ready = self._stream.record_event()

        def wait() -> R:
            torch.cuda.current_stream(self._device).wait_event(ready)
            return made

        return wait
