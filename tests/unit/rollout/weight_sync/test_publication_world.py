"""Simulated publications with the code of a run, beside times by hand."""

from __future__ import annotations

import pytest

from benchmarks.simulation.publication_world import Costs, publish
from rlcore.weights import Bucket, TensorSpec, cut_buckets

SIZE = 1_000_000
CARD = 1e6  # bytes/s: a bucket needs a second


def buckets(count: int) -> tuple[Bucket, ...]:
    return cut_buckets([TensorSpec(f"{i}", (SIZE // 2,), "bfloat16") for i in range(count)], SIZE)


def costs(**changes: float) -> Costs:
    free = {"card": CARD, "nvlink": 1e15, "load_s": 0.0, "load_rate": 1e15, "way_s": 0.0}
    free |= {"stock_load_s": 0.0, "digest_rate": 1e15, "call_s": 0.0, "broadcast": CARD}
    return Costs(**{**free, **changes})


def test_one_rank_sends_to_one_engine_at_the_rate_of_its_card() -> None:
    published = publish(buckets(4), ranks=1, engines=1, costs=costs())
    assert published.seconds == pytest.approx(4.0)
    assert published.sent == {0: 4 * SIZE}


def test_engines_of_one_rank_share_its_card() -> None:
    published = publish(buckets(4), ranks=1, engines=3, costs=costs())
    assert published.seconds == pytest.approx(12.0)
    assert published.sent == {0: 12 * SIZE}


def test_engines_are_assigned_to_the_ranks() -> None:
    published = publish(buckets(4), ranks=2, engines=5, costs=costs())
    assert published.sent == {0: 12 * SIZE, 1: 8 * SIZE}


def test_ranks_that_help_carry_equal_parts() -> None:
    """Rank 0 calls the engines, and rank 1 sends: half a second a bucket through each card."""
    free = costs(broadcast=1e15, nvlink=1e15)
    world = {"ranks": 4, "engines": 2, "gpus": 8, "costs": free}
    published = publish(buckets(4), **world)
    assert published.sent == {1: 4 * SIZE, 2: 4 * SIZE}
    # an eighth of each bucket passes every card between the ranks
    assert 4 * 0.5 < published.seconds < 4 * (0.5 + 0.125) + 1e-6
    alone = publish(buckets(4), rails=1, **world)
    assert alone.sent == {0: 4 * SIZE, 2: 4 * SIZE}
    assert 4 * 1.0 < alone.seconds < 4 * (1.0 + 0.125) + 1e-6


def test_a_call_ahead_hides_its_way_and_loading_hides_behind_the_transfer() -> None:
    """Four buckets of a second, loaded in half a second; a call has a way of a second."""
    slow = costs(load_s=0.5, stock_load_s=0.5, way_s=1.0, digest_rate=4e6)
    control = 8 * 1.0  # health, pause, begin, health, join; end_update, set_version, resume
    one = publish(buckets(4), ranks=1, engines=1, costs=slow, calls_ahead=False).seconds
    two = publish(buckets(4), ranks=1, engines=1, costs=slow).seconds
    assert one == pytest.approx(control + 4 * (1.0 + 1.0 + 0.5))
    # the way to the engine, and four transfers; the last digest hides behind the next call's way
    assert two == pytest.approx(control + 0.5 + 4 * 1.0)


def test_buckets_are_rounded_where_they_are_assembled() -> None:
    """Two seconds a bucket, then one and an eighth between the ranks; a second to the engines."""
    whole = cut_buckets([TensorSpec(f"{i}", (SIZE,), "bfloat16") for i in range(4)], 2 * SIZE)
    slow = costs(quantise_rate=1e6, nvlink=1e15)
    published = publish(buckets(4), ranks=2, engines=2, costs=slow, whole=whole)
    assert published.sent == {0: 4 * SIZE, 1: 4 * SIZE}
    assert published.seconds == pytest.approx(4 * (2.0 + 1.0) + 1.0)


def test_rank_0_s_calls_limit_many_engines() -> None:
    published = publish(buckets(10), ranks=64, engines=64, costs=costs(call_s=0.1))
    assert published.seconds > 10 * 64 * 0.1
