"""The order of draws: seeded, reshuffled at each pass, addressed and resumable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data.loading import MixtureStream, Share
from rlcore.data.order import permutation
from rlcore.data.prompts import PromptStream
from rlcore.errors import DataError


def rows(stream: PromptStream, count: int) -> list[int]:
    return [stream.row(draw) for draw in stream.take(count)]


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**64, 2**65 - 1])
def test_every_whole_number_is_a_seed_of_64_bits(seed):
    assert permutation(9, seed, 2).tolist() == permutation(9, seed % 2**64, 2).tolist()


def test_each_pass_is_a_fresh_permutation():
    stream = PromptStream(50, seed=3)
    passes = [rows(stream, 50) for _ in range(3)]
    assert all(sorted(order) == list(range(50)) for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    assert passes == [rows(s, 50) for s in [PromptStream(50, seed=3)] for _ in range(3)]
    assert passes[0] != rows(PromptStream(50, seed=4), 50)


def test_the_order_does_not_depend_on_the_machine():
    """Pinned: a checkpoint of today must resume on tomorrow's numpy."""
    assert rows(PromptStream(8, seed=1), 10) == [3, 5, 2, 7, 0, 6, 1, 4, 0, 6]


def test_without_shuffle_file_order_repeats():
    assert rows(PromptStream(3, seed=1, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


@given(
    size=st.integers(1, 20),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cut=st.integers(0, 7),
)
@settings(max_examples=60, deadline=None)
def test_a_resumed_stream_continues_the_undisturbed_order(size, steps, cut):
    undisturbed = PromptStream(size, seed=7)
    expected = [rows(undisturbed, count) for count in steps]
    stream = PromptStream(size, seed=7)
    got = []
    for i, count in enumerate(steps):
        if i == cut:
            state = json.loads(json.dumps(stream.snapshot()))
            stream = PromptStream(size, seed=7)
            stream.restore(state)
        got.append(rows(stream, count))
    assert got == expected


def test_requeued_draws_come_first_and_keep_their_numbers():
    stream = PromptStream(10, seed=1)
    assert stream.take(4) == [0, 1, 2, 3]
    stream.requeue(3)
    stream.requeue(1)
    assert stream.epoch == pytest.approx(0.2)
    again = PromptStream(10, seed=1)
    again.restore(json.loads(json.dumps(stream.snapshot())))
    for s in (stream, again):
        assert s.take(1) == [1]
        assert s.take(3) == [3, 4, 5]
        assert s.epoch == pytest.approx(0.6)


def test_only_taken_draws_can_be_requeued_and_only_once():
    stream = PromptStream(10, seed=1)
    stream.take(2)
    stream.requeue(1)
    for draw in (1, 2, -1):
        with pytest.raises(ValueError, match=f"draw {draw} was not taken"):
            stream.requeue(draw)


def test_other_prompts_are_refused_on_restore():
    state = PromptStream(10, seed=1, fingerprint="aa").snapshot()
    with pytest.raises(DataError, match=r"saved with 10 prompts.*now gives 11"):
        PromptStream(11, seed=1, fingerprint="aa").restore(state)
    with pytest.raises(DataError, match=r"fingerprint aa.*bb"):
        PromptStream(10, seed=1, fingerprint="bb").restore(state)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"seed": 2}, "run.seed: 1, and"), ({"seed": 1, "shuffle": False}, "data.shuffle: true, and")],
)
def test_another_order_is_refused_on_restore(given, named):
    """In the middle of a pass some rows would come twice, and others never."""
    stream = PromptStream(10, seed=1)
    before = stream.snapshot()
    stream.take(3)
    other = PromptStream(10, **given)
    with pytest.raises(DataError, match=f"the run was saved with {named}"):
        other.restore(json.loads(json.dumps(stream.snapshot())))
    other.restore(before)  # of a run that has drawn nothing


def test_a_seed_that_orders_nothing_may_change():
    stream = PromptStream(10, seed=1, shuffle=False)
    stream.take(3)
    other = PromptStream(10, seed=2, shuffle=False)
    other.restore(stream.snapshot())
    assert rows(other, 2) == [3, 4]


def test_a_seed_that_chooses_the_sources_may_not_change():
    shares = [Share("a", 0, 4, 0.5), Share("b", 4, 6, 0.5)]
    stream = MixtureStream(shares, seed=1, shuffle=False)
    stream.take(3)
    with pytest.raises(DataError, match=r"the run was saved with run\.seed: 1"):
        MixtureStream(shares, seed=2, shuffle=False).restore(stream.snapshot())
