"""The next result is made while the last is in use, never two, and in order."""

from __future__ import annotations

import threading

import pytest
import torch

from backends.megatron.weights.prefetch import prefetched

CPU = torch.device("cpu")
PATIENCE_S = 20.0


def test_the_next_is_made_while_the_last_is_in_use() -> None:
    begun = [threading.Event() for _ in range(5)]
    done: list[int] = []

    def make(item: int) -> int:
        begun[item].set()
        done.append(item)
        return 10 * item

    seen = []
    for made in prefetched(make, range(4), CPU):
        seen.append(made)
        following = made // 10 + 1
        # in the consumer's hands, and the next is at work: it would never begin otherwise
        if following < 4:
            assert begun[following].wait(PATIENCE_S)
        assert len(done) <= following + 1  # ... and no further
    assert seen == [0, 10, 20, 30]
    assert done == [0, 1, 2, 3]


def test_none_and_one() -> None:
    assert list(prefetched(str, [], CPU)) == []
    assert list(prefetched(str, [7], CPU)) == ["7"]


def test_an_error_comes_in_its_turn() -> None:
    def make(item: int) -> int:
        if item == 2:
            raise RuntimeError("a peer is gone")
        return item

    seen = []
    with pytest.raises(RuntimeError, match="a peer is gone"):
        seen.extend(prefetched(make, range(4), CPU))
    assert seen == [0, 1]


def test_a_consumer_that_stops_leaves_nothing_half_made() -> None:
    made: list[int] = []
    release = threading.Event()

    def make(item: int) -> int:
        if item == 1:
            assert release.wait(PATIENCE_S)
        made.append(item)
        return item

    things = prefetched(make, range(4), CPU)
    assert next(things) == 0
    release.set()
    things.close()
    assert made == [0, 1]


def test_no_gradients_in_the_thread() -> None:
    assert list(prefetched(lambda _: torch.is_grad_enabled(), range(3), CPU)) == [False] * 3
    assert torch.is_grad_enabled()
