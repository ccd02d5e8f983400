"""The calculated time of a publication by hand, and how buckets are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlcore.planning.devices import GPUS
from rlcore.planning.memory import Layout
from rlcore.planning.publication import (
    SMALL_BUCKET,
    Costs,
    Publication,
    PublishedBucket,
    bucket_limit,
    cut,
    in_turn,
    one_sender,
    sender_each,
    together,
)
from rlcore.weights import TensorSpec, cut_buckets

COSTS = Costs(card=10.0, nvlink=20.0, broadcast=20.0, bucket_s=1.0, call_s=0.5)


def test_a_bucket_is_made_while_the_one_before_it_is_sent() -> None:
    assert in_turn([3.0, 1.0, 6.0], [2.0, 2.0, 2.0]) == 3 + 2 + 6 + 2


def test_time_by_hand() -> None:
    # made 10 s; two copies of 10 s; 1 s at the engine and two calls of 0.5 s take less
    assert one_sender([100, 100], 2, COSTS) == 10 + 20 + 20
    # made 5 + 5 s; one copy of 10 s, and an eighth of the broadcast between the ranks
    assert sender_each([100, 100], 2, 2, COSTS) == 10 + 11.25 + 11.25
    assert sender_each([100, 100], 2, 1, COSTS) == 10 + 21.25 + 21.25
    # half a copy through each of two cards: making takes longer
    assert sender_each([100, 100], 2, 2, COSTS, rails=2) == 10 + 10 + 6.25
    # small buckets: 1 s at the engine takes longer than the copies of 0.5 s
    assert sender_each([5, 5], 2, 2, COSTS) == 0.5 + 1 + 1
    # forty calls of 0.5 s take longer than a copy
    assert sender_each([100, 100], 40, 40, COSTS) == 10 + 20 + 20
    usual = Costs.of(GPUS["H100"])
    assert (usual.card, usual.nvlink) == pytest.approx((Costs().card, Costs().nvlink))
    assert usual.broadcast == pytest.approx(Costs().broadcast)


def test_cut() -> None:
    sizes = [(4, "a"), (4, "a"), (4, "a"), (20, "a"), (1, "a"), (1, "b")]
    assert [list(place) for place in cut(sizes, 8)] == [[0, 1], [2], [3], [4], [5]]
    assert cut([], 8) == []
    whole = cut(sizes, 8, [range(1, 3)])
    assert [list(place) for place in whole] == [[0], [1, 2], [3], [4], [5]]
    assert [list(place) for place in cut(sizes, 1, [range(3)])] == [[0, 1, 2], [3], [4], [5]]
    assert bucket_limit(SMALL_BUCKET, 1 << 30) == SMALL_BUCKET
    assert bucket_limit(64 * SMALL_BUCKET, 1 << 30) == 4 * SMALL_BUCKET
    assert bucket_limit(64 * SMALL_BUCKET, 1 << 20) == 1 << 20


def test_parts_that_an_engine_fuses_stay_together() -> None:
    names = [
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer in range(2)
        for part in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    ]
    assert together(names) == [range(4), range(5, 9)]
    assert together(names[1:5]) == []  # without a low-rank form of the queries
    buckets = cut_buckets([TensorSpec(name, (4,), "float32") for name in names], 16)
    assert [len(bucket.tensors) for bucket in buckets] == [4, 1, 4, 1]


def test_senders_and_who_gets_the_buckets() -> None:
    bucket = PublishedBucket(100, columns=40, groups=20)
    published = Publication((bucket, bucket), 8, "distributed", senders=8, kv_groups=4)
    assert published.sending_ranks(Layout(data=4)) == 4
    assert published.is_everywhere(Layout(data=4))
    assert not published.is_everywhere(Layout())
    assert published.seconds(Layout(data=4), COSTS) == sender_each([100, 100], 8, 4, COSTS)
    assert published.seconds(Layout(), COSTS) == one_sender([100, 100], 8, COSTS)
    by_handle = Publication((bucket, bucket), 8, "tensor", senders=8, kv_groups=4)
    assert by_handle.is_everywhere(Layout())
    assert by_handle.seconds(Layout(), COSTS) is None
    assert published.buffers(Layout(data=4), rank0=True) == 200
    # parts of columns come from the other rank; of q, k, v each rank arranges its half
    assert published.buffers(Layout(tensor=2, data=2), rank0=True) == 200 + max(20, 20)


def test_ranks_with_nothing_else_to_do_send_together() -> None:
    bucket = PublishedBucket(100)
    eight = Publication((bucket,), 8, "distributed", senders=8, kv_groups=4, rails=4)
    alone = replace(eight, rails=1)
    assert [eight.rails_of(Layout(data=ranks)) for ranks in (4, 8, 16, 24, 64)] == [1, 1, 2, 3, 4]
    assert replace(eight, rails=16).rails_of(Layout(data=256)) == 8  # of one machine
    layout = Layout(data=16)
    assert eight.seconds(layout, COSTS) == sender_each([100], 8, 8, COSTS, rails=2)
    assert eight.buffers(layout, rank0=True) == alone.buffers(layout, rank0=True)
    # a rank that helps receives a bucket aside
    assert (eight.passed_on(layout), alone.passed_on(layout)) == (100, 0)
    one = replace(eight, engines=1, senders=1)
    assert one.is_everywhere(Layout(data=2))
    assert not replace(one, rails=1).is_everywhere(Layout(data=2))
    assert replace(eight, transport="tensor").rails_of(layout) == 1


def test_buffers_where_rank_0_sends_alone() -> None:
    bucket = PublishedBucket(100, columns=40, groups=20)
    published = Publication((bucket, bucket), 8, "distributed", senders=1, kv_groups=4)
    layout = Layout(tensor=2, data=2)
    assert published.buffers(layout, rank0=True) == 200 + 20
    # half of q, k, v of each of two buckets, arranged before it is sent to rank 0
    assert published.buffers(layout, rank0=False) == 20
