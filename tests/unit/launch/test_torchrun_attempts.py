"""Restarted ranks find one another, and whether to resume, in a store that survives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
import torch.distributed as dist

from rlcore.errors import DeadlineExceeded
from rlcore.launch.environment import here_key, store_prefix
from rlcore.launch.run_folder import mark_opened
from rlcore.launch.torchrun_attempts import Attempt, RunHasEnded, join_attempt, mark_ended

WORLD = 3
LIMIT_S = 120  # of a machine that stands still for a while
FIRST = Attempt(0, resumes=False)
SECOND = Attempt(1, resumes=False)


class Ranks:
    """Each start of a rank is a thread; a forgotten thread is a process that died waiting."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.store = dist.HashStore()

    def start(self, rank: int, *, timeout_s: float = LIMIT_S) -> Future[Attempt]:
        return self.pool.submit(join_attempt, self.store, rank, WORLD, timeout_s=timeout_s)

    def start_all(self) -> list[Attempt]:
        return [joining.result(LIMIT_S) for joining in [self.start(rank) for rank in range(WORLD)]]

    def of(self, attempt: Attempt) -> dist.Store:
        return dist.PrefixStore(attempt.prefix, self.store)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ThreadPoolExecutor() as pool:
        yield Ranks(pool)


def is_waiting(joining: Future[Attempt]) -> bool:
    return bool(wait([joining], timeout=0.3).not_done)


def test_the_first_attempt_resumes_nothing(ranks: Ranks) -> None:
    assert ranks.start_all() == [FIRST] * WORLD
    assert FIRST.prefix == "rlcore/0"


def test_a_waiting_rank_says_so_where_a_monitor_looks(ranks: Ranks) -> None:
    with pytest.raises(DeadlineExceeded):
        ranks.start(0, timeout_s=0.3).result()
    waiting = ranks.start(2)
    store = dist.PrefixStore(store_prefix(), ranks.store)
    store.wait([here_key(2)])
    assert [store.check([here_key(rank)]) for rank in range(WORLD)] == [True, False, True]
    mark_ended(store, 0)  # else it goes on waiting
    with pytest.raises(RunHasEnded):
        waiting.result(LIMIT_S)


def test_a_later_attempt_resumes_a_run_that_an_earlier_one_has_opened(ranks: Ranks) -> None:
    mark_opened(ranks.of(ranks.start_all()[0]))
    assert ranks.start_all() == [Attempt(1, resumes=True)] * WORLD
    assert ranks.start_all() == [Attempt(2, resumes=True)] * WORLD, (
        "also where the second opened nothing"
    )


def test_a_refusal_before_the_run_was_opened_is_repeated(ranks: Ranks) -> None:
    ranks.start_all()
    assert ranks.start_all() == [SECOND] * WORLD


def test_a_rank_that_came_back_first_waits_for_the_next_attempt(ranks: Ranks) -> None:
    """Rank 0 has yet to notice: this attempt has had its rank 1."""
    ranks.start_all()
    back = ranks.start(1)
    assert is_waiting(back)
    others = [ranks.start(0), ranks.start(2)]
    assert [joining.result(LIMIT_S) for joining in (back, *others)] == [SECOND] * WORLD


def test_no_rank_joins_an_attempt_whose_rank_0_is_dead(ranks: Ranks) -> None:
    """Rank 2 died before it came, so rank 0 was ended while it waited; rank 0 is replaced last."""
    dead = ranks.start(0, timeout_s=0.3)
    with pytest.raises(DeadlineExceeded):
        dead.result(LIMIT_S)
    early = [ranks.start(1), ranks.start(2)]
    assert all(is_waiting(joining) for joining in early)
    assert [joining.result(LIMIT_S) for joining in (ranks.start(0), *early)] == [SECOND] * WORLD


def test_a_rank_that_died_before_all_had_come_is_replaced(ranks: Ranks) -> None:
    joining = [ranks.start(0), ranks.start(1)]
    assert all(is_waiting(one) for one in joining)
    keys = ranks.of(FIRST)
    keys.wait([here_key(1)])
    keys.delete_key(here_key(1))  # seen again once the successor has registered
    successor = ranks.start(1)
    keys.wait([here_key(1)])
    last = ranks.start(2)
    assert [one.result(LIMIT_S) for one in (joining[0], successor, last)] == [FIRST] * WORLD


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_restarts_after_the_end_finds_the_exit_code(ranks: Ranks, rank: int) -> None:
    """It died on its way out; the others are gone."""
    mark_ended(ranks.of(ranks.start_all()[0]), 130)
    with pytest.raises(RunHasEnded) as ended:
        ranks.start(rank).result(LIMIT_S)
    assert ended.value.code == 130


def test_without_rank_0_the_wait_ends_with_the_key_that_sets_it(ranks: Ranks) -> None:
    with pytest.raises(
        DeadlineExceeded,
        match=r"rank 3 waited 0\.2 s \(cluster\.start_timeout_s\) for rank 0 to start",
    ):
        ranks.start(3, timeout_s=0.2).result(LIMIT_S)


def test_rank_0_names_those_that_did_not_come(ranks: Ranks) -> None:
    waiting = ranks.start(1, timeout_s=2)
    keys = dist.PrefixStore(FIRST.prefix, ranks.store)
    keys.set(here_key(1), "")  # as rank 1 does once rank 0 is there
    with pytest.raises(
        DeadlineExceeded,
        match=r"rank 0 waited 0\.5 s \(cluster\.start_timeout_s\) for rank 2 to start",
    ):
        ranks.start(0, timeout_s=0.5).result(LIMIT_S)
    with pytest.raises(DeadlineExceeded):
        waiting.result(LIMIT_S)
