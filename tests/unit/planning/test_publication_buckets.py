"""How buckets are cut, which ranks get them, and what they take there."""

from __future__ import annotations

from dataclasses import replace

from rlcore.planning.memory import Layout
from rlcore.planning.publication import SMALL_BUCKET, Publication, bucket_limit, cut, together
from rlcore.weights import TensorSpec, cut_buckets


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
    published = Publication((100, 60, 80), 50, 8, "distributed", senders=4)
    assert published.is_everywhere(Layout(data=4))
    assert not published.is_everywhere(Layout())
    assert not replace(published, senders=1).is_everywhere(Layout(data=4))
    assert [published.engines_of_a_sender(Layout(data=n)) for n in (1, 3, 4, 8)] == [8, 3, 2, 2]
    by_handle = replace(published, transport="tensor")
    assert by_handle.is_everywhere(Layout())
    assert by_handle.engines_of_a_sender(Layout(data=4)) == 0


def test_buffers_are_two_buckets_and_the_parts_that_ranks_exchange() -> None:
    """One serves the first and the third bucket, the other the second."""
    published = Publication((100, 60, 80), 50, 8, "distributed", senders=4)
    assert published.buffers(Layout(data=4)) == 160
    assert published.buffers(Layout(tensor=2, data=2)) == 160 + 50
    rounded = replace(published, unrounded=110)
    assert rounded.buffers(Layout(data=4)) == 160 + 110
