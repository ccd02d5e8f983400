"""The slots of tokens in a pack that holds each common prefix once.

    prompt a b c        slots 0 1 2 3
    prompt a b d    slots 0 1 2 4    shares three tokens with the previous sequence
    prompt e        slots 0 5        shares one

After equal tokens a causal model computes equal values, so a prefix of several sequences is
computed once, at one slot per token. `slots`, which maps many tokens to one slot, describes a pack
completely.
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
# Rows of a sequence: sharing fewer costs attention more than it saves.
MIN_SHARED = 1 / 16


@dataclass(frozen=True)
class Sharing:
    """The slots of B sequences with N tokens.

    Attributes:
        slots: int64 [N], the slot of every token.
        shared: int64 [B], how many tokens at a sequence's start use another sequence's slots.
        order: int64 [B], the sequences in the order of their own tokens' slots.
        size: slots of the pack so far; each sequence's own tokens are padded at their end.
    """

    slots: Tensor
    shared: Tensor
    order: Tensor
    size: int

    @property
    def num_shared(self) -> int:
        """Return how many tokens use other tokens' slots."""
        return int(self.shared.sum())


def share_nothing(lengths: Tensor, *, multiple: int = 1) -> Sharing:
    """Give every token its own slot, sequence after sequence.

    Args:
        lengths: int64 [B].
        multiple: a sequence's slots are padded to a multiple of this.
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
    """Give equal tokens after equal tokens the same slot.

    In the order of their tokens, a sequence shares with any earlier sequence at most the prefix
    that it shares with its predecessor, so a single pass finds a whole tree of prefixes.

    Args:
        tokens: int [N], sequence after sequence.
        lengths: int64 [B].
        multiple: a sequence's own slots are padded to a multiple of this.
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
    """The prefixes shared between sequences, for a plan that keeps such sequences together.

    Attributes:
        order: int64 [B], the sequences, with those of a common prefix next to one another.
        shared: int64 [B], how many tokens sequence `order[k]` shares with `order[k - 1]`; 0 at the
            beginning of a group.
    """

    order: NDArray[np.int64]
    shared: NDArray[np.int64]

    def among(self, sequences: Sequence[int]) -> Beginnings:
        """Return the beginnings of some of the sequences."""
        chosen = np.zeros(len(self.order), dtype=bool)
        chosen[np.asarray(sequences, dtype=np.int64)] = True
        positions = np.flatnonzero(chosen[self.order])
        if not len(positions):
            return Beginnings(self.order[:0], self.shared[:0])
        # Two sequences share the minimum of what all neighbours between them share.
        borders = np.concatenate([[0], positions[:-1] + 1])
        return Beginnings(self.order[positions], np.minimum.reduceat(self.shared, borders))


def beginnings_of(
    tokens: Tensor, cu_tokens: Tensor, group_ids: Tensor, alike: Tensor | None = None
) -> Beginnings:
    """Find the prefixes shared by sequences of each group.

    Args:
        tokens: int [T], sequence after sequence.
        cu_tokens: int64 [B+1].
        group_ids: int64 [B]; sequences of different groups are not compared.
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
        positions = in_order(sequences)
        order += [members[i] for i in positions]
        shared.append(0)
        shared += [worth_sharing(sequences[a], sequences[b]) for a, b in pairwise(positions)]
    return Beginnings(np.array(order, dtype=np.int64), np.array(shared, dtype=np.int64))


def _rows(tokens: Tensor, alike: Tensor | None) -> NDArray[np.int32]:
    """Return the values of each token that must be equal, [T, columns]."""
    rows: NDArray[np.int32]
    if alike is None:
        rows = tokens.int().numpy()[:, None]
    else:
        rows = torch.cat([tokens.int()[:, None], alike.int().flatten(1)], dim=1).numpy()
    return rows


def in_order(sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Return the indices of sequences sorted by their rows; equal sequences keep their order.

    Long sequences are read only as far as needed to order them.
    """
    depth = min((common_prefix(sequences[0], other) for other in sequences[1:]), default=0)
    keys = [_key(sequence[depth : depth + _KEY_ROWS]) for sequence in sequences]
    if len(set(keys)) < len(keys):
        keys = [_key(sequence[depth:]) for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def _key(rows: NDArray[np.int32]) -> bytes:
    return rows.astype(">u4").tobytes()


def worth_sharing(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many rows [n, k] `other` shares with `one`; 0 if they are too few."""
    common = common_prefix(one, other)
    return common if common >= MIN_SHARED * len(other) else 0


def common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the length of the common prefix of two arrays [n, k], in rows."""
    size = min(len(one), len(other))
    begin = 0
    while begin < size:
        end = min(4 * begin + _KEY_ROWS, size)
        differ = (one[begin:end] != other[begin:end]).any(axis=1)
        if differ.any():
            return begin + int(differ.argmax())
        begin = end
    return size
