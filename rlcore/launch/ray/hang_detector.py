"""Finds an actor that hangs, and ends it: for Ray an actor lives as long as its process does."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError

from rlcore.deadlines import STALL_S

BEAT_S = 1.0


class HangDetector:
    """Calls `beat` of an actor, which Ray starts again when it dies.

    The time until the actor's first answer does not count: its start has a deadline elsewhere.

    Args:
        limit_s: the silence after which the actor counts as hung.
    """

    def __init__(self, actor: Any, *, limit_s: float) -> None:
        self._actor = actor
        self._limit_s = limit_s
        self._beat: Any = None  # the call that is not answered yet
        self._is_up = False
        now = time.monotonic()
        self._heard_at = now
        self._checked_at = now

    def check(self) -> float | None:
        """End the actor if it hangs, and return for how many seconds it was silent, else None.

        Call it often; it never waits.
        """
        now = time.monotonic()
        if now - self._checked_at > STALL_S:
            self._heard_at = now
        self._checked_at = now
        if self._beat is None:
            if now - self._heard_at >= BEAT_S:
                self._beat = self._actor.beat.remote()
            return None
        if ray.wait([self._beat], timeout=0)[0]:
            self._is_up = _succeeded(self._beat)
            self._beat = None
            self._heard_at = now
            return None
        silent_s = now - self._heard_at
        if not self._is_up or silent_s < self._limit_s:
            return None
        self._is_up = False
        ray.kill(self._actor, no_restart=False)
        return silent_s


def _succeeded(call: Any) -> bool:
    try:
        ray.get(call)
    except RayError:  # its process is gone, and is started again
        return False
    return True
