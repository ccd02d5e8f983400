"""Ranks that torchrun starts again find one another, and whether the run goes on, in a store that outlives them."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from rlcore.errors import DeadlineExceeded
from rlcore.launch.attempts import Attempt, RunHasEnded, join_attempt, mark_ended
from rlcore.launch.run_folder import mark_opened


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def opened(store: dist.Store, attempt: Attempt) -> None:
    mark_opened(dist.PrefixStore(attempt.prefix, store))


def test_the_first_attempt_goes_on_with_nothing(store: dist.Store) -> None:
    first = Attempt(0, goes_on=False)
    assert [join_attempt(store, rank, timeout_s=5) for rank in range(3)] == [first] * 3
    assert first.prefix == "rlcore/0"


def test_a_later_attempt_goes_on_with_a_run_that_an_earlier_one_has_opened(store: dist.Store) -> None:
    opened(store, join_attempt(store, 0, timeout_s=5))
    second, third = join_attempt(store, 0, timeout_s=5), join_attempt(store, 0, timeout_s=5)
    assert (second, third) == (Attempt(1, goes_on=True), Attempt(2, goes_on=True)), "also where the second opened nothing"
    assert join_attempt(store, 1, timeout_s=5) == third, "the others join the newest"


def test_what_was_refused_before_the_run_was_opened_is_refused_again(store: dist.Store) -> None:
    join_attempt(store, 0, timeout_s=5)
    assert join_attempt(store, 0, timeout_s=5) == Attempt(1, goes_on=False)


def test_a_rank_that_came_back_first_waits_for_the_next_attempt(store: dist.Store) -> None:
    """Rank 0 has yet to notice: this attempt has had its rank 1."""
    for rank in (0, 1):
        join_attempt(store, rank, timeout_s=5)
    joined: list[Attempt] = []
    waiting = threading.Thread(target=lambda: joined.append(join_attempt(store, 1, timeout_s=10)))
    waiting.start()
    waiting.join(0.3)
    assert not joined
    join_attempt(store, 0, timeout_s=5)
    waiting.join(5)
    assert joined == [Attempt(1, goes_on=False)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_started_again_after_the_end_is_told_so(store: dist.Store, rank: int) -> None:
    """It died on its way out; the others are gone."""
    for each in (0, 1):
        attempt = join_attempt(store, each, timeout_s=5)
    mark_ended(dist.PrefixStore(attempt.prefix, store), 130)
    with pytest.raises(RunHasEnded) as ended:
        join_attempt(store, rank, timeout_s=5)
    assert ended.value.code == 130


def test_without_rank_0_the_wait_ends_with_the_key_that_sets_it(store: dist.Store) -> None:
    with pytest.raises(DeadlineExceeded, match=r"rank 3 waited 0\.2 s \(cluster\.start_timeout_s\) for rank 0 to start"):
        join_attempt(store, 3, timeout_s=0.2)
