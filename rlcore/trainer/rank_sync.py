"""How ranks agree without waiting inside a collective.

Generation can take longer than any collective may, so rank 0 does its part alone and posts the
outcome in a key-value store; the other ranks poll it, each wait with a deadline. Early stop,
SIGTERM and errors travel the same way: all ranks leave at the same step.

An error anywhere ends the run. The first rank that fails says so under one key, where every wait
looks; a rank that breaks in a collective because a peer is gone finds the reason there too.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from torch.distributed import DistError

from rlcore.errors import DeadlineExceeded, FailedElsewhere, RlcoreError, RunFailed, UserError

T = TypeVar("T")
POLL_S = 0.002
POLL_MAX_S = 0.05
BLAME_S = 3.0  # for a peer's failure to become known, once a collective broke
_FAILED = "failed"


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Failure:
    """What ended the run: the first rank that failed, and its error in a line or two."""

    rank: int
    error: str
    bad_input: bool = False
    waited: bool = False  # it waited for a peer until its deadline: the peer is to blame

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


class PeerFailed(RunFailed):
    """Another rank failed; the message is that rank's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def post_failure(store: Store, failure: Failure) -> None:
    """Say what ended the run, unless something else is said already."""
    store.compare_set(_FAILED, "", json.dumps(asdict(failure)))


def read_failure(store: Store) -> Failure | None:
    return Failure(**json.loads(store.get(_FAILED))) if store.check([_FAILED]) else None


class RankSync:
    """One object a rank. `run_on_rank0`, `broadcast`, `barrier` and `gather` are called by all
    ranks in the same order.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.doing = "starting"  # for those who ask where this rank is stuck
        self._count = 0
        self._interrupted = threading.Event()

    # --- agreement --------------------------------------------------------------------------------

    def run_on_rank0(self, what: str, work: Callable[[], T], *, timeout_s: float) -> T | None:
        """Rank 0 runs `work` and returns its value; the others wait until it is done and return
        None.

        An exception of `work` is raised on every rank: on rank 0 itself, elsewhere as `PeerFailed`.
        """
        key = self._next_key(what)
        if self.rank == 0:
            value = self._lead(work)
            self.store.set(key, "")
            return value
        self._wait(key, f"rank 0: {what}", timeout_s)
        return None

    def broadcast(self, what: str, work: Callable[[], str], *, timeout_s: float) -> str:
        """As `run_on_rank0`, but every rank gets the string that rank 0's `work` returned."""
        key = self._next_key(what)
        if self.rank == 0:
            value = self._lead(work)
            self.store.set(key, value)
            return value
        self._wait(key, f"rank 0: {what}", timeout_s)
        return self.store.get(key).decode()

    def barrier(self, what: str, *, timeout_s: float) -> None:
        """Rank 0 waits here until every rank has come here; the others go on. Errors as `gather`."""
        self.gather(what, "", timeout_s=timeout_s)

    def gather(self, what: str, word: str, *, timeout_s: float) -> list[str]:
        """Rank 0 gets every rank's word, in their order; the others an empty list at once.

        Raises:
            UserError: a rank was given bad input (rank 0).
            PeerFailed: a rank failed otherwise.
        """
        key = self._next_key(what)
        if self.rank != 0:
            self.store.set(f"{key}/{self.rank}", word)
            return []
        words = [word]
        for rank in range(1, self.world_size):
            self._wait(f"{key}/{rank}", f"rank {rank}: {what}", timeout_s)
            words.append(self.store.get(f"{key}/{rank}").decode())
        return words

    def wait_until(self, ready: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        """Wait for what this process does by itself, with an ear for the others.

        Raises:
            DeadlineExceeded: naming `what`.
            UserError, PeerFailed: another rank failed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        pause = POLL_S
        while not ready():
            self.announce_interrupt()
            if (failure := read_failure(self.store)) is not None:
                raise self._peer_error(failure)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"rank {self.rank} waited {timeout_s:.0f} s for {what}")
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_MAX_S)

    def _next_key(self, what: str) -> str:
        self.doing = what
        self._count += 1
        return f"main/{self._count}"

    def _lead(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException as error:  # told at once: closing what is open may take a while
            self.fail(error)
            raise

    def _wait(self, key: str, what: str, timeout_s: float) -> None:
        self.wait_until(lambda: self.store.check([key]), what, timeout_s=timeout_s)

    # --- a clean end ------------------------------------------------------------------------------

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

    @property
    def was_signalled(self) -> bool:
        """This very process was asked to end."""
        return self._interrupted.is_set()

    # --- failures ---------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Leave this rank's last words where the others find them."""
        if isinstance(error, PeerFailed):
            return
        with suppress(DistError):  # the store's host may be what failed
            post_failure(
                self.store,
                Failure(
                    self.rank,
                    in_one_line(error),
                    isinstance(error, UserError),
                    isinstance(error, DeadlineExceeded),
                ),
            )

    def explain(self, error: BaseException) -> BaseException:
        """The failure of another rank where that is what made `error`, or `error` itself."""
        if (
            self.world_size == 1
            or not isinstance(error, RuntimeError | RunFailed)
            or isinstance(error, PeerFailed)
        ):
            return error
        knows = isinstance(error, RlcoreError) and not isinstance(error, FailedElsewhere)
        deadline = time.monotonic() + (0.0 if knows else BLAME_S)
        failure: Failure | None = None
        with suppress(DistError):
            while (failure := read_failure(self.store)) is None and time.monotonic() < deadline:
                time.sleep(POLL_MAX_S)
        return error if failure is None or failure.rank == self.rank else self._peer_error(failure)

    def _peer_error(self, failure: Failure) -> RlcoreError:
        """Rank 0 speaks for all: what a peer refused as bad input is bad input for the run."""
        if failure.bad_input and self.rank == 0:
            return UserError(f"rank {failure.rank}: {failure.error}")
        return PeerFailed(failure)


def in_one_line(error: BaseException) -> str:
    """The message of what we raise on purpose; for the rest the type, the message and the place."""
    if isinstance(error, RlcoreError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


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

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values[key].encode()
