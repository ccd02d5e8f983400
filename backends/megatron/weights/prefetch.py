"""Prefetching: the next result is computed while the last one is in use.

This happens in a thread on the CPU, and on a stream of its own on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def prefetched(make: Callable[[T], R], items: Sequence[T], device: torch.device) -> Iterator[R]:
    """Yield `make(item)` of each item in order, and make the next while the last is in use.

    `make` is called for one item after the other, without gradients. It must not overwrite its last
    result, which the consumer uses until it asks for the next. When the consumer stops early, the
    call that has begun is finished.
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
        """Start `make(item)`; return a function that waits for the result."""
        ...


class _Thread:
    def __enter__(self) -> _Maker:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
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
    """A second CUDA stream. Calls return when their kernels are queued.

    The two streams wait for each other on the device alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __enter__(self) -> _Maker:
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def begin(self, make: Callable[[T], R], item: T) -> Callable[[], R]:
        # Wait for the consumer's stream: its last step has made the weights, and it no longer reads
        # the memory that is written to.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            made = make(item)
            ready = self._stream.record_event()

        def wait() -> R:
            torch.cuda.current_stream(self._device).wait_event(ready)
            return made

        return wait
