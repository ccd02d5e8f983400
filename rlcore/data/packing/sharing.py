"""Where the tokens of sequences stand in a pack that holds each common prefix once.

    prompt a b c        slots 0 1 2 3
    prompt a b d        slots 0 1 2 4        shares three tokens with the one before it
    prompt e            slots 0 5            shares one

Behind the same tokens a causal model computes the same, so a token that several sequences begin
with is computed once, at one slot. `slots`, many tokens to one slot, is all that a pack needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

_KEY_ROWS = 64
# of a sequence: to share less is not worth what it costs attention
MIN_SHARED = 1 / 16


@dataclass(frozen=True)
class Sharing:
    """The places of B sequences with N tokens.

    Attributes:
        slots: int64 [N], of every token.
        shared: int64 [B], how many tokens at a sequence's start stand at slots of another one.
        order: int64 [B], the sequences in the order in which their own tokens stand.
        size: of the pack so far, in slots; each sequence's own tokens are padded at their end.
    """

    slots: Tensor
    shared: Tensor
    order: Tensor
    size: int

    @property
    def num_shared(self) -> int:
        """Return how many of the tokens stand at slots of other ones."""
        return int(self.shared.sum())


def share_nothing(lengths: Tensor, *, multiple: int = 1) -> Sharing:
    """Give every token a slot of its own, sequence behind sequence.

    Args:
        lengths: int64 [B].
        multiple: of the slots of a sequence.
    """
    padded = -(-lengths // multiple) * multiple
    begins = padded.cumsum(0) - padded
    shift = begins - (lengths.cumsum(0) - lengths)
    total = int(lengths.sum())
    return Sharing(
        slots=torch.arange(total) + shift.repeat_interleave(lengths, output_size=total),
        shared=torch.zeros_like(lengths),
        order=torch.arange(len(lengths)),
        size=int(padded.sum()),
    )


def share_prefixes(
    tokens: Tensor, lengths: Tensor, *, multiple: int = 1, alike: Tensor | None = None
) -> Sharing:
    """Give tokens behind the same tokens the same slot.

    Of sequences in the order of their tokens, what one shares with any before it is what it shares
    with the one right before it. So one pass finds all of a tree of prefixes.

    Args:
        tokens: int [N], sequence behind sequence.
        lengths: int64 [B].
        multiple: of the slots of a sequence's own tokens.
        alike: int [N, ...], which must be equal too.
    """
    rows = _rows(tokens, alike)
    ends = np.cumsum(lengths.numpy())
    begins = ends - lengths.numpy()
    sequences = [rows[begin:end] for begin, end in zip(begins, ends, strict=True)]
    order = in_order(sequences)
    slots = np.empty(len(rows), dtype=np.int64)
    shared = np.zeros(len(sequences), dtype=np.int64)
    size = 0
    for before, i in zip([None, *order], order):
        begin = begins[i]
        common = 0
        if before is not None:
            common = worth_sharing(sequences[before], sequences[i])
            slots[begin : begin + common] = slots[begins[before] : begins[before] + common]
        own = len(sequences[i]) - common
        slots[begin + common : ends[i]] = np.arange(size, size + own)
        shared[i] = common
        size += -(-own // multiple) * multiple
    return Sharing(
        torch.from_numpy(slots),
        torch.from_numpy(shared),
        torch.tensor(order, dtype=torch.int64),
        size,
    )


@dataclass(frozen=True)
class Beginnings:
    """How sequences begin alike, for a plan that keeps such sequences together.

    Attributes:
        order: int64 [B], the sequences such that those that begin alike stand side by side.
        shared: int64 [B], how many tokens the sequence `order[k]` shares with `order[k - 1]`; 0
            where a group begins.
    """

    order: NDArray[np.int64]
    shared: NDArray[np.int64]

    def among(self, sequences: Sequence[int]) -> Beginnings:
        """Return the same of some of the sequences."""
        chosen = np.zeros(len(self.order), dtype=bool)
        chosen[np.asarray(sequences, dtype=np.int64)] = True
        places = np.flatnonzero(chosen[self.order])
        if not len(places):
            return Beginnings(self.order[:0], self.shared[:0])
        # what two have in common is the least that any two between them have
        borders = np.concatenate([[0], places[:-1] + 1])
        return Beginnings(self.order[places], np.minimum.reduceat(self.shared, borders))


def beginnings_of(
    tokens: Tensor, cu_tokens: Tensor, group_ids: Tensor, alike: Tensor | None = None
) -> Beginnings:
    """Find how the sequences of each group begin alike.

    Args:
        tokens: int [T], sequence behind sequence.
        cu_tokens: int64 [B+1].
        group_ids: int64 [B]; what sequences of different groups share is not looked for.
        alike: int [T, ...], which must be equal too.
    """
    rows = _rows(tokens, alike)
    borders = cu_tokens.tolist()
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(i)
    order: list[int] = []
    shared: list[int] = []
    for members in groups.values():
        sequences = [rows[borders[i] : borders[i + 1]] for i in members]
        places = in_order(sequences)
        order += [members[place] for place in places]
        shared.append(0)
        shared += [worth_sharing(sequences[a], sequences[b]) for a, b in pairwise(places)]
    return Beginnings(np.array(order, dtype=np.int64), np.array(shared, dtype=np.int64))


def _rows(tokens: Tensor, alike: Tensor | None) -> NDArray[np.int32]:
    """Return all that must be equal of each token, [T, columns]."""
    rows: NDArray[np.int32]
    if alike is None:
        rows = tokens.int().numpy()[:, None]
    else:
        rows = torch.cat([tokens.int()[:, None], alike.int().flatten(1)], dim=1).numpy()
    return rows


def in_order(sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Return the indices of sequences in the order of their rows; equal ones as they came.

    Of long sequences only what tells them apart is read.
    """
    depth = min((common_prefix(sequences[0], other) for other in sequences[1:]), default=0)
    keys = [_key(sequence[depth : depth + _KEY_ROWS]) for sequence in sequences]
    if len(set(keys)) < len(keys):
        keys = [_key(sequence[depth:]) for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def _key(rows: NDArray[np.int32]) -> bytes:
    return rows.astype(">u4").tobytes()


def worth_sharing(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many of its rows [n, k] `other` shares with `one`: enough of them, or 0."""
    common = common_prefix(one, other)
    return common if common >= MIN_SHARED * len(other) else 0


def common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many rows [n, k] two arrays have in common from their start on."""
    size = min(len(one), len(other))
    begin = 0
    while begin < size:
        end = min(4 * begin + _KEY_ROWS, size)
        differ = (one[begin:end] != other[begin:end]).any(axis=1)
        if differ.any():
            return begin + int(differ.argmax())
        begin = end
    return size
