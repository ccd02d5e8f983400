"""Finds an actor that hangs. For Ray an actor lives as long as its process does, so one that
answers nothing is ended here.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError

BEAT_S = 1.0
STALL_S = 10.0  # between two looks: it was this process that stood still


class Heartbeat:
    """Of an actor that has a method `beat`, and that Ray starts again when it dies.

    Nothing is asked of one that has not answered yet: who needs it has a deadline for its start.

    Args:
        limit_s: the silence after which it counts as hung.
    """

    def __init__(self, actor: Any, *, limit_s: float) -> None:
        self._actor = actor
        self._limit_s = limit_s
        self._asked: Any = None  # a beat that is not answered yet
        self._is_up = False
        self._heard = self._looked = time.monotonic()

    def look(self) -> float | None:
        """End the actor if it hangs: the seconds for which it was silent then, else None. Call it
        often; it never waits.
        """
        now = time.monotonic()
        if now - self._looked > STALL_S:
            self._heard = now
        self._looked = now
        if self._asked is None:
            if now - self._heard >= BEAT_S:
                self._asked = self._actor.beat.remote()
            return None
        if ray.wait([self._asked], timeout=0)[0]:
            self._is_up = _answered(self._asked)
            self._asked = None
            self._heard = now
            return None
        silent_s = now - self._heard
        if not self._is_up or silent_s < self._limit_s:
            return None
        self._is_up = False
        ray.kill(self._actor, no_restart=False)
        return silent_s


def _answered(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayError:  # its process is gone, and is started again
        return False
    return True
