"""Signs of life. Every rank says that it runs; whoever watches takes silence for a hang; and when
the run has failed, a rank that is stuck (in a collective, in a generation) and cannot leave by
itself is ended.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch.distributed as dist

from rlcore.launch.environment import here_key
from rlcore.trainer.rank_sync import Failure, RankSync, Store, post_failure, read_failure

BEAT_S = 1.0
NOTICE_S = 5.0  # from a failure of the run to the end of a rank that has not noticed it
LEAVE_S = 45.0  # ... of one that has, but does not get done with closing what is open
# silence that counts once this process was asked to end: torchrun asks when another one died
SIGNALLED_S = 5.0
STALL_S = 10.0  # between two looks: it was the watcher that stood still
_LEFT = "left"
_STUCK = "stuck"
logger = logging.getLogger(__name__)


def beat_key(rank: int) -> str:
    return f"beat/{rank}"


def read_stuck(store: Store) -> int | None:
    """The first rank that did not leave a failed run by itself."""
    return int(store.get(_STUCK)) if store.check([_STUCK]) else None


def came_late(rank: int) -> Failure:
    """Of a rank that is stuck, where its peers waited for it until their deadline."""
    return Failure(rank, "it did not come to where the others waited for it, and was ended")


class HeartbeatMonitor:
    """Which of `ranks` has been silent for too long. Only changes of a beat count, so no clocks are
    compared.
    """

    def __init__(
        self, store: Store, ranks: Iterable[int], *, limit_s: float, start_limit_s: float
    ) -> None:
        self.store = store
        self.limit_s = limit_s
        self.start_limit_s = start_limit_s
        now = time.monotonic()
        self._beats: dict[int, tuple[str, float]] = dict.fromkeys(ranks, ("", now))
        self._looked = now
        self.last: dict[int, float] = {}  # what `silence` last said

    def silence(self) -> dict[int, float]:
        """Seconds since each rank's last sign of life; ranks that left in peace are not among them."""
        now = time.monotonic()
        # stopped and continued, with all the others maybe
        stalled = now - self._looked > STALL_S
        self._looked = now
        silence: dict[int, float] = {}
        for rank, (before, since) in self._beats.items():
            beat = (
                self.store.get(beat_key(rank)).decode()
                if self.store.check([beat_key(rank)])
                else ""
            )
            if beat != before or stalled:
                self._beats[rank] = beat, now
                since = now
            if beat != _LEFT:
                silence[rank] = now - since
        self.last = silence
        return silence

    def failure(self, *, limit_s: float | None = None) -> Failure | None:
        """The rank that is silent for longer than it may, the longest first. `limit_s` lowers the
        limit.
        """
        limit = self.limit_s if limit_s is None else min(limit_s, self.limit_s)
        late = []
        for rank, seconds in sorted(self.silence().items(), key=lambda item: -item[1]):
            _, _, doing = self._beats[rank][0].partition(" ")
            if doing and seconds > limit:
                key = f"cluster.heartbeat_timeout_s: {self.limit_s:g}"
                return Failure(
                    rank, f"it has been silent for {seconds:.0f} s ({key}); it was at: {doing}"
                )
            if not doing and seconds > self.start_limit_s:
                late.append(rank)
        if not late:
            return None
        # the others wait for it
        missing = (rank for rank in late if not self.store.check([here_key(rank)]))
        why = (
            f"it has not joined the others within {self.start_limit_s:g} s"
            " (cluster.start_timeout_s)"
        )
        return Failure(next(missing, late[0]), why)


class Heartbeat:
    """One thread a rank: beats, watches (rank 0 all others, they rank 0), and ends this process
    where it must.

    Args:
        store: used by this thread alone. A store that another thread waits on would keep the beats
            from going out.
        last_words: called with the failure right before this process is ended from here; may grow.
    """

    def __init__(
        self,
        store: Store,
        sync: RankSync,
        watch: HeartbeatMonitor,
        last_words: Sequence[Callable[[Failure], None]],
    ) -> None:
        self._store = store
        self._sync = sync
        self._watch = watch
        self._last_words = last_words
        self._stopped = threading.Event()
        self._leaving = threading.Event()
        self._alone = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def quiet(self) -> list[int]:
        """Watched ranks that have skipped a beat or two: where a peer is known to be gone, they are
        who.
        """
        return [rank for rank, seconds in self._watch.last.items() if seconds > 2 * BEAT_S]

    def leaving(self) -> None:
        """The main thread knows that the run is over, and is closing what is open."""
        self._leaving.set()

    def alone(self) -> None:
        """Nobody else is needed from now on, or missed."""
        self._alone.set()

    def stop(self, *, in_peace: bool) -> None:
        """No more beats; `in_peace` tells the watchers that this is no hang."""
        self._stopped.set()
        self._thread.join(NOTICE_S)
        if in_peace:
            try:
                self._sync.store.set(beat_key(self._sync.rank), _LEFT)
            except dist.DistError as error:  # recovery: none is needed, nobody is left to watch
                logger.info("the run's store is gone: %s", error)

    def _run(self) -> None:
        number = 0
        noticed = 0.0
        while not self._stopped.is_set():
            failure = self._look(number)
            if failure is not None:
                noticed = noticed or time.monotonic()
                if time.monotonic() - noticed > (LEAVE_S if self._leaving.is_set() else NOTICE_S):
                    self._end(failure)
            number += 1
            self._stopped.wait(BEAT_S)

    def _look(self, number: int) -> Failure | None:
        try:
            self._store.set(beat_key(self._sync.rank), f"{number} {self._sync.doing}")
            known = read_failure(self._store)
            if known is None and not self._alone.is_set():
                silent = self._watch.failure(
                    limit_s=SIGNALLED_S if self._sync.was_signalled else None
                )
                if silent is not None:
                    post_failure(self._store, silent)
                    known = read_failure(self._store)
            return known
        except dist.DistError as error:  # recovery: none; with its store the run is gone
            return Failure(
                self._sync.rank,
                f"the process that holds the run's store (a launcher, node 0) is gone: {error}",
            )

    def _end(self, failure: Failure) -> None:
        if self._stopped.is_set():
            return
        try:
            if not self._leaving.is_set():
                with suppress(dist.DistError):
                    self._store.compare_set(_STUCK, "", str(self._sync.rank))
            for say in self._last_words:
                say(failure)
        finally:
            os._exit(1)
