"""Agreement of ranks, and a failure that ends all. Ranks are threads over one store here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from torch.distributed import HashStore

from rlcore.errors import ConfigError, DeadlineExceeded, FailedElsewhere, RunFailed, UserError
from rlcore.trainer import rank_sync
from rlcore.trainer.rank_sync import (
    Failure,
    PeerFailed,
    RankSync,
    in_one_line,
    post_failure,
    read_failure,
)

LIMIT_S = 60.0


def run_ranks(*ranks: Callable[[], object]) -> list[object]:
    """Run each in a thread and return what it returned or raised."""
    ended: list[object] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            ended[rank] = ranks[rank]()
        except Exception as error:  # noqa: BLE001  looked at by the test
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return ended


@pytest.fixture
def pair() -> tuple[RankSync, RankSync]:
    store = HashStore()
    return RankSync(store, 0, 2, timeout_s=LIMIT_S), RankSync(store, 1, 2, timeout_s=LIMIT_S)


def fails(error: Exception) -> Callable[[], str]:
    def work() -> str:
        raise error

    return work


def test_rank_0_works_and_every_rank_goes_on(pair):
    said = run_ranks(
        lambda: (
            pair[0].run_on_rank0("a list", lambda: [1]),
            pair[0].broadcast("a word", lambda: "go"),
        ),
        lambda: (
            pair[1].run_on_rank0("a list", fails(AssertionError())),
            pair[1].broadcast("a word", str),
        ),
    )
    assert said == [([1], "go"), (None, "go")]


def test_an_error_of_rank_0_ends_the_others_with_its_words(pair):
    own, peer = run_ranks(
        lambda: pair[0].run_on_rank0(
            "reading", fails(ConfigError("data.paths: nothing there")), timeout_s=LIMIT_S
        ),
        lambda: pair[1].run_on_rank0("reading", str),
    )
    assert isinstance(own, ConfigError)
    assert isinstance(peer, PeerFailed)
    assert str(peer) == "rank 0 failed: data.paths: nothing there"
    assert peer.failure == Failure(0, "data.paths: nothing there", bad_input=True)


def test_waiting_has_a_deadline_that_names_what_was_waited_for(pair):
    with pytest.raises(
        DeadlineExceeded, match=r"rank 1 waited 0 s for rank 0: the rollouts of step 3"
    ):
        pair[1].run_on_rank0("the rollouts of step 3", str, timeout_s=0.05)
    with pytest.raises(
        DeadlineExceeded, match=r"rank 0 waited 0 s for rank 1: building the models"
    ):
        pair[0].barrier("building the models", timeout_s=0.05)


def test_rank_0_does_not_go_on_before_every_rank_has_come(pair):
    order: list[str] = []

    def late() -> None:
        order.append("rank 1 comes")
        pair[1].barrier("building")

    def waits() -> None:
        pair[0].barrier("building")
        order.append("rank 0 goes on")

    run_ranks(waits, late)
    assert order == ["rank 1 comes", "rank 0 goes on"]


def test_what_a_peer_refused_is_bad_input_for_the_run(pair):
    pair[1].fail(ConfigError("model.path: no such folder"))
    with pytest.raises(UserError, match=r"^rank 1: model.path: no such folder$"):
        pair[0].barrier("building")


def test_the_first_failure_is_the_one_that_counts():
    store = HashStore()
    post_failure(store, Failure(1, "first"))
    post_failure(store, Failure(0, "second"))
    assert read_failure(store) == Failure(1, "first")


def test_a_collective_that_breaks_is_explained_by_the_peer_that_broke_it(pair):
    pair[1].fail(ArithmeticError("overflow"))
    explained = pair[0].explain(RuntimeError("Connection closed by peer"))
    assert isinstance(explained, PeerFailed)
    assert str(explained) == "rank 1 failed: ArithmeticError: overflow"


def test_a_bystander_waits_for_the_rank_that_knows(pair, monkeypatch):
    monkeypatch.setattr(rank_sync, "BLAME_S", LIMIT_S)
    later = threading.Timer(
        0.1, pair[1].fail, [RunFailed("writing model: No space left on device")]
    )
    later.start()
    explained = pair[0].explain(FailedElsewhere("writing model failed on rank 1"))
    later.join()
    assert isinstance(explained, PeerFailed)
    assert str(explained) == "rank 1 failed: writing model: No space left on device"


@pytest.mark.parametrize("error", [ConfigError("mine"), ValueError("mine too")])
def test_a_rank_keeps_its_own_error(pair, error):
    pair[1].fail(ArithmeticError("overflow"))
    assert pair[0].explain(error) is error


def test_a_peer_failure_is_not_posted_again(pair):
    pair[0].fail(PeerFailed(Failure(1, "gone")))
    assert read_failure(pair[0].store) is None


def test_unexpected_errors_come_with_their_place():
    with pytest.raises(KeyError) as caught:
        {}["x"]
    assert in_one_line(caught.value).startswith("KeyError: 'x' (")
    assert "test_rank_sync.py" in in_one_line(caught.value)
    assert in_one_line(RunFailed("as it is")) == "as it is"


def test_an_interrupt_of_any_rank_reaches_rank_0(pair):
    pair[1].interrupt()
    assert not pair[0].interrupt_requested
    pair[1].announce_interrupt()
    assert pair[0].interrupt_requested


def test_old_keys_are_deleted_once_every_rank_has_passed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store lives as long as the run."""
    monkeypatch.setattr(rank_sync, "TIDY_EVERY", 4)
    store = HashStore()
    first, second = (RankSync(store, rank, 2, timeout_s=LIMIT_S) for rank in range(2))

    def go(sync: RankSync, steps: int) -> list[str]:
        return [sync.broadcast("a word", lambda: "go") for _ in range(steps)]

    assert run_ranks(lambda: go(first, 40)) == [["go"] * 40]
    assert store.check(["sync/1"]), "rank 1 has not read it"
    assert run_ranks(lambda: go(second, 40)) == [["go"] * 40]
    both = run_ranks(lambda: go(first, 40), lambda: go(second, 40))
    assert both == [["go"] * 40] * 2
    run_ranks(lambda: go(first, 8), lambda: go(second, 8))
    assert not store.check(["sync/1"])
    assert store.num_keys() < 60, "of 88 that were set"


def test_words_that_were_gathered_are_deleted() -> None:
    store = HashStore()
    first, second = (RankSync(store, rank, 2, timeout_s=LIMIT_S) for rank in range(2))
    said = run_ranks(
        lambda: first.gather("words", "mine"), lambda: second.gather("words", "a long one")
    )
    assert said == [["mine", "a long one"], []]
    assert store.num_keys() == 0


def test_one_process_alone_keeps_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sync, "TIDY_EVERY", 4)
    store = HashStore()
    sync = RankSync(store, 0, 1, timeout_s=LIMIT_S)
    for _ in range(100):
        sync.run_on_rank0("a word", lambda: "go")
    assert store.num_keys() <= 5


@pytest.mark.parametrize(("world", "most_s"), [(8, 0.05), (125, 0.05), (1024, 0.4096)])
def test_many_ranks_do_not_flood_their_store(
    monkeypatch: pytest.MonkeyPatch, world: int, most_s: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(rank_sync.time, "sleep", pauses.append)
    sync = RankSync(HashStore(), 1, world, timeout_s=LIMIT_S)
    sync.wait_until(lambda: len(pauses) == 40, "the fortieth look")
    assert pauses[0] == 0.002  # who hardly waits does not wait for long
    assert max(pauses) == pytest.approx(most_s)
    assert all(later <= earlier * 1.5 + 1e-9 for earlier, later in pairwise(pauses))
