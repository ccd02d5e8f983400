"""Heartbeats of the ranks, which reveal a hang.

Every rank beats. A rank that is silent for too long counts as hung. After the run has failed, the
heartbeat thread ends its own process if the main thread is stuck in a collective or a generation.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch.distributed as dist

from rlcore.config.sections.training import ClusterConfig, RunConfig
from rlcore.deadlines import LEAVE_S, REPORT_GRACE_S, SIGNALLED_S, STALL_S
from rlcore.errors import RunFailed
from rlcore.launch.environment import here_key, orphaned
from rlcore.launch.logs import LAST_LINES_OF_A_STACK, describe_failure
from rlcore.stores import Store
from rlcore.trainer.rank_sync import (
    POLL_S,
    Failure,
    RankSync,
    post_failure,
    read_failure,
    read_number,
)

BEAT_S = 1.0
_LEFT = "left"
_STUCK = "stuck"
logger = logging.getLogger(__name__)


def beat_key(rank: int) -> str:
    """Return the key in the store under which a rank beats."""
    return f"beat/{rank}"


def read_stuck(store: Store) -> int | None:
    """Return the first rank that did not leave a failed run by itself, or None."""
    return read_number(store, _STUCK) if store.check([_STUCK]) else None


def raise_if_stuck(store: Store, failure: Failure, run: RunConfig) -> None:
    """Raise RunFailed for the stuck rank that a late peer waited for, with that rank's stacks."""
    stuck = read_stuck(store)
    if failure.waited and stuck is not None:
        blamed = Failure(stuck, "it did not reach the point where the others waited, and was ended")
        raise RunFailed(describe_failure(blamed, run, lines=LAST_LINES_OF_A_STACK))


class HeartbeatMonitor:
    """Finds ranks that have been silent for too long.

    It looks only for changes of the beat, so no clocks are compared.
    """

    def __init__(self, store: Store, ranks: Iterable[int], cluster: ClusterConfig) -> None:
        self.store = store
        self.limit_s = cluster.heartbeat_timeout_s
        self.start_limit_s = cluster.start_timeout_s
        now = time.monotonic()
        self._beats: dict[int, tuple[str, float]] = dict.fromkeys(ranks, ("", now))
        self._checked_at = now
        # The newest result of `silence`.
        self.last: dict[int, float] = {}

    def silence(self) -> dict[int, float]:
        """Return the seconds since each rank's last beat, without ranks that have ended cleanly."""
        now = time.monotonic()
        # This process, and perhaps every other, was suspended and resumed.
        stalled = now - self._checked_at > STALL_S
        self._checked_at = now
        silence: dict[int, float] = {}
        for rank, (before, since) in self._beats.items():
            key = beat_key(rank)
            found = self.store.get(key) if self.store.check([key]) else b""
            beat = found.decode(errors="replace")
            if beat != before or stalled:
                self._beats[rank] = beat, now
                since = now
            if beat != _LEFT:
                silence[rank] = now - since
        self.last = silence
        return silence

    def outlast(self) -> None:
        """Wait until the ranks have left, are lost, or take too long to leave."""
        deadline = time.monotonic() + LEAVE_S
        while silence := self.silence():
            if min(silence.values()) > SIGNALLED_S or time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    def failure(self, *, limit_s: float = math.inf) -> Failure | None:
        """Return the longest silent rank, if longer than the limit, which `limit_s` lowers."""
        late = []
        for rank, seconds in sorted(self.silence().items(), key=lambda item: -item[1]):
            _, _, doing = self._beats[rank][0].partition(" ")
            if doing and seconds > min(limit_s, self.limit_s):
                key = f"cluster.heartbeat_timeout_s: {self.limit_s:g}"
                return Failure(
                    rank, f"it has been silent for {seconds:.0f} s ({key}); it was at: {doing}"
                )
            if not doing and seconds > self.start_limit_s:
                late.append(rank)
        if not late:
            return None
        # A late rank that has joined waits for another late rank.
        missing = (rank for rank in late if not self.store.check([here_key(rank)]))
        limit = f"{self.start_limit_s:g} s (cluster.start_timeout_s)"
        return Failure(next(missing, late[0]), f"it has not joined the others within {limit}")


class Heartbeat:
    """A thread of each rank that beats, monitors peers, and ends a stuck process.

    Rank 0 monitors all others, and they monitor rank 0.

    Args:
        store: for this thread alone; sharing it with a waiting thread would delay the beats.
        on_failure: called with the failure right before this process ends; the list may grow.
    """

    def __init__(
        self,
        store: Store,
        sync: RankSync,
        monitor: HeartbeatMonitor,
        on_failure: Sequence[Callable[[Failure], None]],
    ) -> None:
        self._store = store
        self._sync = sync
        self._monitor = monitor
        self._on_failure = on_failure
        self._stopped = threading.Event()
        # The main thread knows of the failure, and has LEAVE_S to clean up.
        self.cleaning_up = False
        # This rank needs no peer from now on.
        self.ignores_peers = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def silent_ranks(self) -> list[int]:
        """Peers that have missed a beat or two, among them every lost peer."""
        return [rank for rank, seconds in self._monitor.last.items() if seconds > 2 * BEAT_S]

    def stop(self, *, clean: bool) -> None:
        """Stop beating; `clean` marks the silence as intended."""
        self._stopped.set()
        self._thread.join(REPORT_GRACE_S)
        if clean:
            try:
                self._sync.store.set(beat_key(self._sync.rank), _LEFT)
            except dist.DistError as error:
                # No recovery is needed: without the store nobody monitors this rank.
                logger.info("the run's store is gone: %s", error)

    def _run(self) -> None:
        number = 0
        noticed = 0.0
        while not self._stopped.is_set():
            failure = self._beat(number)
            if failure is None:
                # The store answers again.
                noticed = 0.0
            else:
                noticed = noticed or time.monotonic()
                limit_s = LEAVE_S if self.cleaning_up else REPORT_GRACE_S
                if time.monotonic() - noticed > limit_s:
                    self._end(failure)
            number += 1
            self._stopped.wait(BEAT_S)

    def _beat(self, number: int) -> Failure | None:
        """Beat, and return the failure of the run: a posted failure or a silent peer."""
        # A store in a folder outlives the process that made it.
        if orphaned():
            return Failure(self._sync.rank, "the process that started this rank is gone")
        try:
            self._store.set(beat_key(self._sync.rank), f"{number} {self._sync.doing}")
            known = read_failure(self._store)
            if known is None and not self.ignores_peers:
                limit_s = SIGNALLED_S if self._sync.was_signalled else math.inf
                if (silent := self._monitor.failure(limit_s=limit_s)) is not None:
                    post_failure(self._store, silent)
                    known = read_failure(self._store)
            return known
        except dist.DistError as error:
            # No recovery is possible: the run is lost with its store.
            return Failure(
                self._sync.rank,
                f"the process that holds the run's store (a launcher, node 0) is gone: {error}",
            )

    def _end(self, failure: Failure) -> None:
        """End this process, which is stuck."""
        if self._stopped.is_set():
            return
        try:
            if not self.cleaning_up:
                with suppress(dist.DistError):
                    self._store.compare_set(_STUCK, "", str(self._sync.rank))
            for report in self._on_failure:
                report(failure)
        finally:
            os._exit(1)
