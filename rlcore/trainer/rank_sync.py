"""Agreement between ranks through a key-value store, without waiting inside a collective.

Generation can take longer than a collective may, so rank 0 works alone and posts the outcome in the
store; the other ranks poll the store, with a deadline for each wait. Early stopping, SIGTERM and
errors travel the same way, so all ranks leave at the same step.

An error anywhere ends the run. The first rank that fails posts its failure under one key, which
every wait reads. A rank whose collective broke because a peer is gone finds the reason there too.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

from torch.distributed import DistError

from rlcore.deadlines import BLAME_S
from rlcore.errors import DeadlineExceeded, FailedElsewhere, RlcoreError, RunFailed, UserError
from rlcore.stores import Store
from rlcore.timeline.recorder import RECORDER, now

T = TypeVar("T")
SHORT_WAIT_S = 0.001  # shorter waits are not in the timeline
TIDY_EVERY = 256  # keys; about 25 steps
POLL_S = 0.002
POLL_MAX_S = 0.05
# Longest pause for each rank: the store answers some 20,000 requests a second.
POLL_RANK_S = 0.0004
MAX_DIGITS = 19  # of a number in the store
_FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """The failure that ended the run: the first rank that failed, and its error in brief."""

    rank: int
    error: str
    bad_input: bool = False
    waited: bool = False  # the rank waited for a peer until its deadline: the peer is to blame
    kinds: ClassVar[tuple[type, ...]] = (int, str, bool, bool)

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.error}"


class PeerFailed(RunFailed):
    """Another rank failed; the message is that rank's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def post_failure(store: Store, failure: Failure) -> None:
    """Post the failure that ended the run, unless another one was posted before."""
    store.compare_set(_FAILED, "", json.dumps(asdict(failure)))


def read_failure(store: Store) -> Failure | None:
    """Return the failure that was posted first, None without one."""
    if not store.check([_FAILED]):
        return None
    said = store.get(_FAILED)
    try:
        failure = Failure(**json.loads(said))
        if Failure.kinds != tuple(type(value) for value in vars(failure).values()):
            raise TypeError("a field of another type")
    # Another process wrote it. The run ends in any case; report the text that was found.
    except (ValueError, TypeError, RecursionError):
        return Failure(0, f"the run's store holds no failure of a rank: {said[:80]!r}")
    return failure


def read_number(store: Store, key: str) -> int:
    """Return the number under an existing key. Raises RunFailed for any other content."""
    said = store.get(key)
    if not (said.isdigit() and len(said) < MAX_DIGITS):
        raise RunFailed(f"the run's store holds {said[:80]!r} under {key!r}, expected a number")
    return int(said)


def on_rank0(value: T | None) -> T:
    """Return a value that only rank 0 holds; for work that runs there."""
    if value is None:
        raise AssertionError("only rank 0 holds this: use it inside RankSync.run_on_rank0")
    return value


class RankSync:
    """Agreement between ranks. Every rank has one and makes the same calls in the same order.

    Args:
        timeout_s: how long a call waits for another rank, unless the call sets its own limit.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, timeout_s: float) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        # The track of the timeline.
        self.track = (f"rank {rank}", "main")
        # Reported with each heartbeat, to show what a rank waits for.
        self.doing = "starting"
        self._count = 0
        # On rank 0, the number of the newest deleted key.
        self._tidied = 0
        self._interrupted = threading.Event()
        # Between two looks into the store, for something that takes long.
        self.longest_pause_s = max(POLL_MAX_S, POLL_RANK_S * world_size)

    # --- agreement --------------------------------------------------------------------------------

    def run_on_rank0(
        self, what: str, work: Callable[[], T], *, timeout_s: float | None = None
    ) -> T | None:
        """Run `work` on rank 0 and return its value there; the others wait and get None.

        An exception of `work` is raised on every rank: on rank 0 itself, elsewhere as `PeerFailed`.
        """
        key = self._next_key(what)
        if self.rank == 0:
            value = self._post_failure_of(work)
            self.store.set(key, "")
            return value
        self._wait(key, f"rank 0: {what}", timeout_s)
        return None

    def broadcast(
        self, what: str, work: Callable[[], str], *, timeout_s: float | None = None
    ) -> str:
        """Run `work` on rank 0, as in `run_on_rank0`, and return its string on every rank."""
        key = self._next_key(what)
        if self.rank == 0:
            value = self._post_failure_of(work)
            self.store.set(key, value)
            return value
        self._wait(key, f"rank 0: {what}", timeout_s)
        return self.store.get(key).decode(errors="replace")

    def scatter(
        self, what: str, work: Callable[[], Sequence[str]], *, timeout_s: float | None = None
    ) -> str:
        """Run `work` on rank 0, as in `run_on_rank0`, and return to each rank its own string.

        The strings are in rank order. A string with a part for every rank would be broadcast to
        every rank, so its bytes would grow with the square of the ranks.
        """
        key = self._next_key(what)
        if self.rank == 0:
            own, *others = self._post_failure_of(work)
            for rank, value in enumerate(others, start=1):
                self.store.set(f"{key}/{rank}", value)
            return own
        return self._take(f"{key}/{self.rank}", f"rank 0: {what}", timeout_s)

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """Hold rank 0 until every rank arrives; the others continue. Errors as in `gather`."""
        self.gather(what, "", timeout_s=timeout_s)

    def gather(
        self,
        what: str,
        value: str,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Return every rank's value in rank order on rank 0; the others get [] at once.

        Args:
            ranks: the ranks other than rank 0 to gather from, in this order; None: all.

        Raises:
            UserError: another rank got bad input (rank 0).
            PeerFailed: a rank failed otherwise.
        """
        key = self._next_key(what)
        wanted = range(1, self.world_size) if ranks is None else ranks
        if self.rank != 0:
            if self.rank in wanted:
                self.store.set(f"{key}/{self.rank}", value)
            return []
        values = [value]
        for rank in wanted:
            values.append(self._take(f"{key}/{rank}", f"rank {rank}: {what}", timeout_s))
        return values

    def wait_until(
        self, ready: Callable[[], bool], what: str, *, timeout_s: float | None = None
    ) -> None:
        """Wait until `ready` returns True; stop when another rank fails.

        Raises:
            DeadlineExceeded: the wait for `what` took too long.
            UserError, PeerFailed: another rank failed meanwhile.
        """
        began = now()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        pause = POLL_S
        while not ready():
            self.announce_interrupt()
            if (failure := read_failure(self.store)) is not None:
                raise self._peer_error(failure)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"rank {self.rank} waited {limit_s:.0f} s for {what}")
            time.sleep(pause)
            pause = min(pause * 1.5, self.longest_pause_s)
        if (ended := now()) - began > SHORT_WAIT_S:
            RECORDER.add(self.track, f"waits for {what}", began, ended)

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record the time of a block on this rank's track of the timeline."""
        return RECORDER.span(self.track, name, **args)

    def _next_key(self, what: str) -> str:
        self.doing = what
        self._count += 1
        if self._count % TIDY_EVERY == 0:
            self._tidy()
        return f"sync/{self._count}"

    def _tidy(self) -> None:
        """Delete the keys that every rank has passed, since the store lives as long as the run.

        Ranks visit the keys in the same order, so a rank that asks for this key has finished with
        all earlier ones.
        """
        if self.rank != 0:
            self.store.set(f"passed/{self.rank}", str(self._count - 1))
            return
        words = [f"passed/{rank}" for rank in range(1, self.world_size)]
        if words and not self.store.check(words):
            return
        through = min([self._count - 1, *(read_number(self.store, word) for word in words)])
        for count in range(self._tidied + 1, through + 1):
            self.store.delete_key(f"sync/{count}")
        self._tidied = through

    def _post_failure_of(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except BaseException as error:
            # Post at once: closing open resources may take a while.
            self.fail(error)
            raise

    def _wait(self, key: str, what: str, timeout_s: float | None) -> None:
        self.wait_until(lambda: self.store.check([key]), what, timeout_s=timeout_s)

    def _take(self, key: str, what: str, timeout_s: float | None) -> str:
        """Wait for a value that is for this rank alone, and delete it.

        It may be long, and the store lives as long as the run.
        """
        self._wait(key, what, timeout_s)
        value = self.store.get(key).decode(errors="replace")
        self.store.delete_key(key)
        return value

    # --- interruption -----------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Request a clean end after this step (signal handlers, any rank)."""
        self._interrupted.set()

    def announce_interrupt(self) -> None:
        """Report an `interrupt` to rank 0. The signal handler itself must not use the store."""
        if self._interrupted.is_set():
            self.store.set("interrupt", str(self.rank))

    @property
    def interrupt_requested(self) -> bool:
        """Whether any rank was asked to end (rank 0)."""
        return self._interrupted.is_set() or self.store.check(["interrupt"])

    @property
    def was_signalled(self) -> bool:
        """Whether this process itself was asked to end."""
        return self._interrupted.is_set()

    # --- failures ---------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Post the error of this rank, for the others to find."""
        if isinstance(error, PeerFailed):
            return
        # The host of the store may have failed.
        with suppress(DistError):
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
        """Return the failure of another rank if it may have caused `error`, else `error`."""
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
        """Return the error to raise. On rank 0, bad input of a peer is bad input of the run."""
        if failure.bad_input and self.rank == 0:
            return UserError(f"rank {failure.rank}: {failure.error}")
        return PeerFailed(failure)


def in_one_line(error: BaseException) -> str:
    """Return the message of an RlcoreError, or the type, message and location of other errors."""
    if isinstance(error, RlcoreError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    location = (
        f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    )
    return f"{type(error).__name__}: {error}{location}"
