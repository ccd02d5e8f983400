"""The two signals that ask a run to end, SIGTERM and Ctrl-C, and who hears them for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def hearing(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """SIGTERM and SIGINT go to `handler` while open, and to those before it afterwards. In the main
    thread alone.
    """
    previous = {
        number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
