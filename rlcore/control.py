"""How ranks agree without waiting inside a collective.

Generation can take longer than any collective may, so rank 0 does its part alone and posts the outcome in a key-value store;
the other ranks poll it, each wait with a deadline. Early stop, SIGTERM and errors travel the same way: all ranks leave at
the same step.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

from rlcore.errors import DeadlineExceeded, RlcoreError, RunFailed, UserError

T = TypeVar("T")
POLL_S = 0.002
POLL_MAX_S = 0.05


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class PeerFailed(RunFailed):
    """Another rank failed; the message is that rank's."""


class Control:
    """One object a rank. `main` is called by all ranks in the same order."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self._count = 0
        self._interrupted = threading.Event()

    def main(self, what: str, work: Callable[[], T], *, timeout_s: float) -> T | None:
        """Rank 0 runs `work` and returns its value; the others wait until it is done and return None.

        An exception of `work` is raised on every rank: on rank 0 itself, elsewhere as `PeerFailed`.
        """
        self._count += 1
        key = f"main/{self._count}"
        if self.rank == 0:
            try:
                value = work()
            except BaseException as error:
                self._post(key, {"error": _plain(error), "what": what})
                raise
            self._post(key, {})
            return value
        self._wait(key, what, timeout_s)
        return None

    def decide(self, what: str, work: Callable[[], str], *, timeout_s: float) -> str:
        """As `main`, but every rank gets the string that rank 0's `work` returned."""
        self._count += 1
        key = f"main/{self._count}"
        if self.rank == 0:
            try:
                value = work()
            except BaseException as error:
                self._post(key, {"error": _plain(error), "what": what})
                raise
            self._post(key, {"value": value})
            return value
        return str(self._wait(key, what, timeout_s)["value"])

    def interrupt(self) -> None:
        """Ask for a clean end at the next decision (signal handlers, any rank)."""
        self._interrupted.set()

    def announce_interrupt(self) -> None:
        """Tell rank 0, from ordinary code: a signal handler must not enter the store."""
        if self._interrupted.is_set():
            self.store.set("interrupt", str(self.rank))

    @property
    def interrupt_requested(self) -> bool:
        return self._interrupted.is_set() or self.store.check(["interrupt"])

    def fail(self, error: BaseException) -> None:
        """Leave this rank's last words where the others find them."""
        if not isinstance(error, PeerFailed):
            self._post("failed", {"error": _plain(error), "rank": self.rank})

    def _post(self, key: str, value: dict[str, object]) -> None:
        self.store.set(key, json.dumps(value))

    def _wait(self, key: str, what: str, timeout_s: float) -> dict[str, object]:
        deadline = time.monotonic() + timeout_s
        pause = POLL_S
        while not self.store.check([key]):
            self.announce_interrupt()
            if self.store.check(["failed"]):
                failed = json.loads(self.store.get("failed"))
                raise PeerFailed(f"rank {failed['rank']} failed: {failed['error']}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"rank {self.rank} waited {timeout_s:.0f} s for rank 0: {what}")
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_MAX_S)
        answer: dict[str, object] = json.loads(self.store.get(key))
        if "error" in answer:
            raise PeerFailed(f"rank 0 failed in {answer['what']}: {answer['error']}")
        return answer


def _plain(error: BaseException) -> str:
    """One line for what we raise on purpose; a traceback for the rest."""
    if isinstance(error, RlcoreError | UserError):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()


class LocalStore:
    """The store of a run with one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self._values[key] = value

    def get(self, key: str, /) -> bytes:
        return self._values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        if not self.check(keys):
            raise DeadlineExceeded(f"{keys} never appeared")
