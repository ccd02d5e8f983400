"""Attempts: the ranks that torchrun restarts (`--max-restarts`) agree which start this is.

torchrun counts restarts per node, and a replaced node counts from 0, so its count is useless.
Rank 0 announces an attempt in the launcher's store, which outlives the ranks. Each other rank
registers there for the newest attempt, and rank 0 begins it when all have registered.

A rank thus joins an attempt only while its rank 0 is alive. If rank 0 died first, the attempt never
begins, and the ranks that wait for it move on to the next. An attempt that has begun takes no
replacement for a dead rank. A rank that is restarted after the end of the run finds the run's
exit code in the store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlcore.errors import DeadlineExceeded
from rlcore.launch.environment import here_key, store_prefix
from rlcore.launch.run_folder import was_opened
from rlcore.stores import Store, keys_under

POLL_S = 0.1
# Keys of the launcher's store ...
_COUNT = "rlcore/attempts"
_NEWEST = "rlcore/newest_attempt"
# ... and of each attempt:
_RESUMES = "resumes"
_BEGUN = "begun"
_ENDED = "ended"


@dataclass(frozen=True)
class Attempt:
    """A start of all ranks."""

    number: int
    resumes: bool  # an earlier attempt had taken the run's folder

    @property
    def prefix(self) -> str:
        """The prefix of this attempt's keys in the store."""
        return store_prefix(self.number)


FIRST = Attempt(0, False)


class RunHasEnded(Exception):
    """The run has ended with exit code `code`, so there is nothing to join."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run has ended with exit code {code}")
        self.code = code


def mark_ended(store: Store, code: int) -> None:
    """Store the run's exit code; rank 0 calls this after writing the result of the run."""
    store.set(_ENDED, str(code))


def has_ended(store: Store) -> bool:
    """Return whether `mark_ended` was called in this attempt's `store`."""
    return store.check([_ENDED])


def join_attempt(store: Store, rank: int, world_size: int, *, timeout_s: float) -> Attempt:
    """Join the newest attempt, which rank 0 announces and begins when all ranks have registered.

    Raises:
        DeadlineExceeded: a rank did not start within cluster.start_timeout_s; names the rank.
        RunHasEnded: the run is over.
    """
    return _announce(store, world_size, timeout_s) if rank == 0 else _follow(store, rank, timeout_s)


def _announce(store: Store, world_size: int, timeout_s: float) -> Attempt:
    _raise_if_ended(store)
    number = store.add(_COUNT, 1) - 1
    resumes = any(was_opened(_keys_of(before, store)) for before in range(number))
    keys = _keys_of(number, store)
    keys.set(_RESUMES, str(int(resumes)))
    keys.set(here_key(0), "")
    store.set(_NEWEST, str(number))
    deadline = time.monotonic() + timeout_s
    missing = [*range(1, world_size)]
    while missing := [rank for rank in missing if not keys.check([here_key(rank)])]:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"rank 0 waited {timeout_s:g} s (cluster.start_timeout_s) for rank"
                f" {', '.join(map(str, missing))} to start: look at its node's output"
            )
        time.sleep(POLL_S)
    keys.set(_BEGUN, "")
    return Attempt(number, resumes)


def _follow(store: Store, rank: int, timeout_s: float) -> Attempt:
    deadline = time.monotonic() + timeout_s
    registered: int | None = None
    while time.monotonic() < deadline:
        _raise_if_ended(store)
        if store.check([_NEWEST]):
            number = int(store.get(_NEWEST))
            keys = _keys_of(number, store)
            has_begun = keys.check([_BEGUN])
            if has_begun and registered == number:
                return Attempt(number, keys.get(_RESUMES) == b"1")
            if not has_begun and registered != number:
                keys.set(here_key(rank), "")
                registered = number
        time.sleep(POLL_S)
    raise DeadlineExceeded(
        f"rank {rank} waited {timeout_s:g} s (cluster.start_timeout_s) for rank 0 to start: look at"
        " the first node's output"
    )


def _raise_if_ended(store: Store) -> None:
    if store.check([_NEWEST]):
        attempt = _keys_of(int(store.get(_NEWEST)), store)
        if has_ended(attempt):
            raise RunHasEnded(int(attempt.get(_ENDED)))


def _keys_of(number: int, store: Store) -> Store:
    return keys_under(store_prefix(number), store)
