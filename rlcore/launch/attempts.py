"""Which start of the ranks this is, where torchrun starts them again (`--max-restarts`), and
whether the run goes on in it.

torchrun counts restarts a node, and a node that came back counts from 0. So ranks do not go by
    that: rank 0 announces an
attempt in the launcher's store, which outlives the ranks, each other rank says there that it is
here for the newest one, and rank 0 begins it when all are. Who enters an attempt has therefore met
its rank 0 alive: one whose rank 0 is dead never begins, and who waits for it moves on to the next;
one that has begun is closed to a rank that comes in the place of one that died. A rank that died
when the run was over already, and is started again, has nobody to meet: it is told so there too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist

from rlcore.errors import DeadlineExceeded
from rlcore.launch.environment import here_key, store_prefix
from rlcore.launch.run_folder import was_opened
from rlcore.trainer.rank_sync import Store

POLL_S = 0.1
_COUNT = "rlcore/attempts"
_NEWEST = "rlcore/newest_attempt"
_ENDED = "ended"


@dataclass(frozen=True)
class Attempt:
    """A start of all ranks. `goes_on`: one before it had taken the run's folder, so that this one
    resumes it.
    """

    number: int
    goes_on: bool

    @property
    def prefix(self) -> str:
        """Of everything that its ranks say in the store."""
        return store_prefix(self.number)


FIRST = Attempt(0, False)


class RunHasEnded(Exception):
    """There is nothing to join. `code`: the exit code of the run."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run has ended with exit code {code}")
        self.code = code


def mark_ended(store: Store, code: int) -> None:
    """Said by rank 0, in the store of its attempt, once the result of the run is written."""
    store.set(_ENDED, str(code))


def has_ended(store: Store) -> bool:
    """Whether the result of the run is written, which this attempt's `store` knows."""
    return store.check([_ENDED])


def join_attempt(store: dist.Store, rank: int, world_size: int, *, timeout_s: float) -> Attempt:
    """Rank 0 announces a new attempt and waits for everybody; another rank waits until one begins
    that it is here for.

    Raises:
        DeadlineExceeded: somebody did not come (cluster.start_timeout_s); names who.
        RunHasEnded: there is nothing to come for.
    """
    return _announce(store, world_size, timeout_s) if rank == 0 else _follow(store, rank, timeout_s)


def _announce(store: dist.Store, world_size: int, timeout_s: float) -> Attempt:
    _leave_what_has_ended(store)
    number = store.add(_COUNT, 1) - 1
    goes_on = any(
        was_opened(dist.PrefixStore(store_prefix(before), store)) for before in range(number)
    )
    store.set(_goes_on(number), str(int(goes_on)))
    store.set(_here(number, 0), "")
    store.set(_NEWEST, str(number))
    deadline = time.monotonic() + timeout_s
    missing = list(range(1, world_size))
    while missing := [rank for rank in missing if not store.check([_here(number, rank)])]:
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise DeadlineExceeded(
                f"rank 0 waited {timeout_s:g} s (cluster.start_timeout_s) for rank {ranks} to"
                " start: look at its node's output"
            )
        time.sleep(POLL_S)
    store.set(_begun(number), "")
    return Attempt(number, goes_on)


def _follow(store: dist.Store, rank: int, timeout_s: float) -> Attempt:
    deadline = time.monotonic() + timeout_s
    here_for: int | None = None
    while time.monotonic() < deadline:
        _leave_what_has_ended(store)
        if store.check([_NEWEST]):
            number = int(store.get(_NEWEST))
            has_begun = store.check([_begun(number)])
            if has_begun and here_for == number:
                return Attempt(number, store.get(_goes_on(number)) == b"1")
            if not has_begun and here_for != number:
                store.set(_here(number, rank), "")
                here_for = number
        time.sleep(POLL_S)
    raise DeadlineExceeded(
        f"rank {rank} waited {timeout_s:g} s (cluster.start_timeout_s) for rank 0 to start: look at"
        " the first node's output"
    )


def _leave_what_has_ended(store: dist.Store) -> None:
    if store.check([_NEWEST]):
        attempt = dist.PrefixStore(store_prefix(int(store.get(_NEWEST))), store)
        if has_ended(attempt):
            raise RunHasEnded(int(attempt.get(_ENDED)))


def _goes_on(number: int) -> str:
    return f"{store_prefix(number)}/goes_on"


def _here(number: int, rank: int) -> str:
    return f"{store_prefix(number)}/{here_key(rank)}"


def _begun(number: int) -> str:
    return f"{store_prefix(number)}/begun"
