"""Handles SIGTERM and Ctrl-C, the two signals that ask a run to end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handling_stop_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Send SIGTERM and SIGINT to `handler` while open. Only the main thread may call this."""
    previous = {
        number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
