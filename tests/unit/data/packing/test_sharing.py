"""Where tokens stand in a pack that holds each common prefix once."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data.packing.sharing import (
    Beginnings,
    Sharing,
    beginnings_of,
    common_prefix,
    in_order,
    share_nothing,
    share_prefixes,
)

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=8)


def flat(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.tensor([t for one in sequences for t in one], dtype=torch.int32)
    return tokens, torch.tensor([len(one) for one in sequences], dtype=torch.int64)


def each(sharing: Sharing, lengths: torch.Tensor) -> list[list[int]]:
    return [part.tolist() for part in sharing.slots.split(lengths.tolist())]


def in_common(one: list[int], other: list[int]) -> int:
    return next(
        (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@settings(max_examples=300)
@given(sequences=SEQUENCES, multiple=st.sampled_from([1, 4]))
def test_tokens_share_a_slot_if_all_up_to_them_is_equal(
    sequences: list[list[int]], multiple: int
) -> None:
    tokens, lengths = flat(sequences)
    sharing = share_prefixes(tokens, lengths, multiple=multiple)
    slots = each(sharing, lengths)
    for one, here in zip(sequences, slots, strict=True):
        assert len(set(here)) == len(here)
        for other, there in zip(sequences, slots, strict=True):
            common = in_common(one, other)
            assert here[:common] == there[:common]
            assert not {*here[common:]} & {*there[common:]}
    distinct = {tuple(one[:k]) for one in sequences for k in range(1, len(one) + 1)}
    assert len({slot for here in slots for slot in here}) == len(distinct)
    # the own tokens of each stand side by side, in the order that is told, padded at their end
    begin = 0
    for i in sharing.order.tolist():
        own = slots[i][int(sharing.shared[i]) :]
        assert own == [*range(begin, begin + len(own))]
        begin += -(-len(own) // multiple) * multiple
    assert sharing.size == begin


@given(sequences=SEQUENCES, multiple=st.sampled_from([1, 4]))
def test_without_sharing_sequences_stand_one_behind_the_other(
    sequences: list[list[int]], multiple: int
) -> None:
    _, lengths = flat(sequences)
    sharing = share_nothing(lengths, multiple=multiple)
    padded = [-(-n // multiple) * multiple for n in lengths.tolist()]
    starts = [0, *accumulate(padded)]
    assert each(sharing, lengths) == [
        [*range(a, a + n)] for a, n in zip(starts, lengths.tolist(), strict=False)
    ]
    assert sharing.size == starts[-1]
    assert not sharing.shared.any()


def test_other_records_end_a_sharing() -> None:
    tokens, lengths = flat([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8]])
    records = torch.zeros(12, 2, 1, dtype=torch.int16)
    records[4 + 1, 1] = -1  # of the second token of the second sequence
    slots = each(share_prefixes(tokens, lengths, alike=records), lengths)
    assert slots[0] == slots[2]
    assert slots[1][0] == slots[0][0]
    assert not {*slots[1][1:]} & {*slots[0]}


GROUPED = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 2)), max_size=9
)


@settings(max_examples=200)
@given(rows=GROUPED, data=st.data())
def test_what_begins_alike_stands_side_by_side(
    rows: list[tuple[list[int], int]], data: st.DataObject
) -> None:
    sequences = [tokens for tokens, _ in rows]
    tokens, lengths = flat(sequences)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    groups = torch.tensor([group for _, group in rows], dtype=torch.int64)
    found = beginnings_of(tokens, cu, groups)
    check(found, sequences, groups.tolist(), [*range(len(rows))])
    some = data.draw(
        st.lists(st.sampled_from(range(len(rows))), unique=True) if rows else st.just([])
    )
    check(found.among(some), sequences, groups.tolist(), some)


def check(
    found: Beginnings, sequences: list[list[int]], groups: list[int], members: list[int]
) -> None:
    assert sorted(found.order.tolist()) == sorted(members)
    assert len(found.shared) == len(members)
    assert not len(members) or found.shared[0] == 0
    for (one, other), shared in zip(pairwise(found.order.tolist()), found.shared[1:], strict=True):
        alike = in_common(sequences[one], sequences[other])
        assert shared == (alike if groups[one] == groups[other] else 0)
    # together they hold each prefix of a group once
    own = sum(len(sequences[i]) for i in members) - int(np.sum(found.shared))
    distinct = {
        (groups[i], *sequences[i][:k]) for i in members for k in range(1, len(sequences[i]) + 1)
    }
    assert own == len(distinct)


def test_a_token_of_a_hundred_is_not_shared() -> None:
    """All chats of a model begin alike, which is not worth a mask."""
    sequences = [[1, *range(2 + k, 98 + k)] for k in range(3)]
    tokens, lengths = flat(sequences)
    assert share_prefixes(tokens, lengths).num_shared == 0
    assert share_prefixes(*flat([one[:15] for one in sequences])).num_shared == 2


@given(
    draws=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 70), st.integers(0, 1)), max_size=6
    )
)
def test_long_sequences_are_told_apart_where_they_differ(draws: list[tuple[int, int, int]]) -> None:
    sequences = [
        np.array([7] * same + [0] * zeros + [9] * last, dtype=np.int32)[:, None]
        for same, zeros, last in draws
    ]
    plain = [one[:, 0].tolist() for one in sequences]
    assert in_order(sequences) == sorted(range(len(plain)), key=plain.__getitem__)
    for one, a in zip(sequences, plain, strict=True):
        for other, b in zip(sequences, plain, strict=True):
            assert common_prefix(one, other) == in_common(a, b)
