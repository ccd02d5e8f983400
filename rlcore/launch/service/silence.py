"""Notices that the service hangs: its process lives, and answers nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from rlcore.deadlines import STALL_S

BEAT_S = 1.0
LOOK_S = 0.5


def await_silence(
    beat: Callable[[], Future[Any]], ended: threading.Event, *, limit_s: float
) -> float | None:
    """Return once no beat was answered for `limit_s`, with the seconds; None when it `ended`.

    The time until the first answer does not count: the start has a deadline elsewhere. Neither does
    time in which this process stood still.
    """
    is_up = False
    while not ended.wait(BEAT_S):
        answer = beat()
        asked = looked = time.monotonic()
        while not wait([answer], timeout=LOOK_S).done:
            now = time.monotonic()
            if now - looked > STALL_S:
                asked = now
            looked = now
            if ended.is_set():
                return None
            if is_up and now - asked > limit_s:
                return now - asked
        is_up = True
    return None
