"""How a process ends: signals and the deadline after them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlcore.deadlines import EXIT_S


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


def leave_in_time(code: int) -> None:
    """End this process with `code` after EXIT_S, unless it has ended by itself.

    Python waits without limit for threads that are not daemons and for children of
    `multiprocessing`, which an environment may have left behind. These children are killed.
    """
    threading.Thread(target=_leave, args=(code,), name="leaving", daemon=True).start()


def _leave(code: int) -> None:
    time.sleep(EXIT_S)
    # An import could wait for a lock that a hanging thread holds.
    multiprocessing = sys.modules.get("multiprocessing")
    children = [] if multiprocessing is None else multiprocessing.active_children()
    left = [f"process {child.pid} ({child.name})" for child in children]
    left += [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]
    print(
        f"rlcore: ended by force, since something was left behind: {', '.join(left) or 'unknown'}",
        file=sys.stderr,
        flush=True,
    )
    for child in children:
        child.kill()
    os._exit(code)
