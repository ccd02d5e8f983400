"""Which ranks count as hung."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from rlcore.config.sections.training import ClusterConfig
from rlcore.deadlines import STALL_S
from rlcore.launch import heartbeat as heartbeat
from rlcore.launch.environment import here_key
from rlcore.launch.heartbeat import Heartbeat, HeartbeatMonitor, beat_key
from rlcore.trainer.rank_sync import Failure, RankSync, read_failure


def limits(*, start_s: float) -> ClusterConfig:
    return ClusterConfig(heartbeat_timeout_s=20, start_timeout_s=start_s)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heartbeat, "time", made)
    return made


class Ranks:
    """Two ranks that beat on request, and a monitor of them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.store = HashStore()
        self.number = 0
        self.monitor = HeartbeatMonitor(self.store, range(2), limits(start_s=60))

    def beat(self, *ranks: int, doing: str = "training") -> None:
        self.number += 1
        for rank in ranks:
            self.store.set(beat_key(rank), f"{self.number} {doing}")

    def pass_time(self, seconds: float, *beating: int) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.beat(*beating)
            self.monitor.silence()


@pytest.fixture
def ranks(clock: Clock) -> Ranks:
    return Ranks(clock)


def test_a_rank_that_stops_beating_is_named_with_what_it_was_at(ranks):
    ranks.beat(0, 1)
    ranks.pass_time(20, 0)
    assert ranks.monitor.failure() is None
    ranks.pass_time(2, 0)
    failure = ranks.monitor.failure()
    assert failure.rank == 1
    assert (
        failure.error
        == "it has been silent for 21 s (cluster.heartbeat_timeout_s: 20); it was at: training"
    )


def test_a_shorter_limit_can_be_asked_for(ranks):
    ranks.beat(0, 1)
    ranks.pass_time(7, 0)
    assert ranks.monitor.failure() is None
    assert ranks.monitor.failure(limit_s=5).rank == 1
    assert ranks.monitor.failure(limit_s=500) is None


def test_a_rank_that_never_came_has_the_longer_limit(ranks):
    ranks.pass_time(60, 0)
    assert ranks.monitor.failure() is None
    ranks.pass_time(1, 0)
    assert (
        ranks.monitor.failure().error
        == "it has not joined the others within 60 s (cluster.start_timeout_s)"
    )


@pytest.mark.parametrize("ignores", [False, True])
def test_a_rank_that_ignores_its_peers_misses_none(
    monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    monkeypatch.setattr(heartbeat, "REPORT_GRACE_S", 600.0)
    store: Any = HashStore()

    def beats() -> int:
        return int(store.get(beat_key(0)).split()[0])

    def await_a_whole_beat() -> None:
        limit = time.monotonic() + 60
        before = beats()
        while beats() < before + 2:
            assert time.monotonic() < limit
            time.sleep(0.01)

    beating = Heartbeat(
        store,
        RankSync(store, 0, 2, timeout_s=5),
        HeartbeatMonitor(store, [1], limits(start_s=0.5)),
        [],
    )
    if ignores:
        beating.ignores_peers = True
    await_a_whole_beat()  # one that had begun before may still look at the peers
    clock.now += 1.0
    await_a_whole_beat()
    beating.stop(clean=True)
    assert (read_failure(store) is None) == ignores


def test_before_ranks_have_met_the_missing_one_is_named(ranks):
    ranks.store.set(here_key(0), "")
    ranks.pass_time(61)
    assert ranks.monitor.failure().rank == 1
    ranks.store.set(here_key(1), "")
    assert ranks.monitor.failure().rank == 0, "all are there, and something else holds them up"


def test_a_rank_that_is_still_on_its_way_hides_no_other(ranks):
    ranks.beat(0)
    ranks.pass_time(30)
    assert ranks.monitor.failure().rank == 0


def test_a_rank_that_ended_cleanly_is_not_missed(ranks):
    ranks.beat(0, 1)
    ranks.pass_time(1, 0, 1)
    ranks.store.set(beat_key(1), "left")
    ranks.pass_time(200, 0)
    assert ranks.monitor.failure() is None


def test_a_monitor_that_was_stopped_starts_to_count_anew(ranks):
    """A laptop that slept, or a run that was stopped and continued: all were silent."""
    ranks.beat(0, 1)
    ranks.monitor.silence()
    ranks.clock.now += 3600
    assert ranks.monitor.failure() is None
    ranks.pass_time(19, 0)
    assert ranks.monitor.failure() is None
    ranks.pass_time(2, 0)
    assert ranks.monitor.failure().rank == 1


def test_a_stall_is_longer_than_the_time_between_two_checks():
    assert STALL_S > 5 * heartbeat.BEAT_S


def test_two_short_failures_of_the_store_are_not_one_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process ends when the run has failed for REPORT_GRACE_S, without a beat between."""
    clock = [0.0]
    gone = Failure(0, "the store is gone")
    said = iter([gone, None, gone, None, gone, None, gone, gone, gone])
    ended: list[float] = []
    done = threading.Event()

    def beat(self: Heartbeat, number: int) -> Failure | None:
        clock[0] += heartbeat.REPORT_GRACE_S * 0.6
        return next(said)

    def end(self: Heartbeat, failure: Failure) -> None:
        ended.append(clock[0])
        self._stopped.set()
        done.set()

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.0)
    monkeypatch.setattr(Heartbeat, "_beat", beat)
    monkeypatch.setattr(Heartbeat, "_end", end)
    Heartbeat(None, None, None, ())  # type: ignore[arg-type]
    assert done.wait(30)
    assert ended == [pytest.approx(9 * 0.6 * heartbeat.REPORT_GRACE_S)]
