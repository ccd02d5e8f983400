"""Prefetching: the next result is computed while the last one is in use.

The next result is computed in a thread on the CPU, and on a second stream on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def prefetched(make: Callable[[T], R], items: Sequence[T], device: torch.device) -> Iterator[R]:
    """Yield `make(item)` of each item in order, and make the next while the last is in use.

    `make` is called for one item at a time, without gradients. It must not overwrite its last
    result, which the consumer uses until it requests the next. If the consumer stops early, the
    call in progress finishes.
    """

    def without_gradients(item: T) -> R:
        with torch.no_grad():
            return make(item)

    on_gpu = device.type == "cuda"
    start = _on_stream(without_gradients, device) if on_gpu else _in_thread(without_gradients)
    with start as begin:
        pending = begin(items[0]) if items else None
        for following in items[1:]:
            assert pending is not None
            made = pending()
            pending = begin(following)
            yield made
        if pending is not None:
            yield pending()


@contextmanager
def _in_thread(make: Callable[[T], R]) -> Iterator[Callable[[T], Callable[[], R]]]:
    """Yield a function that starts `make(item)` and returns a function to wait for the result."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as worker:
        yield lambda item: worker.submit(make, item).result


@contextmanager
def _on_stream(
    make: Callable[[T], R], device: torch.device
) -> Iterator[Callable[[T], Callable[[], R]]]:
    """As `_in_thread`, on a second CUDA stream.

    Calls return when their kernels are queued. The two streams wait for each other on the device,
    without blocking the host.
    """
    stream = torch.cuda.Stream(device)

    def begin(item: T) -> Callable[[], R]:
        # Wait for the consumer's stream: its last step made the weights, and it may still read the
        # memory that `make` overwrites.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            made = make(item)
            ready = stream.record_event()

        def wait() -> R:
            torch.cuda.current_stream(device).wait_event(ready)
            return made

        return wait

    try:
        yield begin
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
