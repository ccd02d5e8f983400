"""The chunks of a pack's sequences, for layers that carry a state along each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.planning.activations import CHUNK


@dataclass(frozen=True)
class Scan:
    """The sequences of a whole pack, cut into chunks, so that a state advances in all of them.

    Chunks are ordered by their number inside their sequence, and then by the sequences' lengths,
    longest first. So step s works on `counts[s]` chunks in a row, and its states are the first
    `counts[s]` states of the step before. The state of every sequence starts from 0.
    """

    # int64 [chunks, size]: slots; the last chunk of a sequence repeats its last slot
    slots: Tensor
    counts: tuple[int, ...]
    restore: Tensor  # int64 [slots]: the position of each slot among the chunks' [chunks * size]
    sequences: Tensor  # int64 [slots]: the number of each slot's sequence

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device, size: int = CHUNK) -> Scan:
        """Cut sequences of these lengths, which follow each other in the pack."""
        sizes, order = torch.tensor(lengths, dtype=torch.int64).sort(descending=True, stable=True)
        starts = torch.tensor(lengths, dtype=torch.int64).cumsum(0)[order] - sizes
        numbers = torch.arange(-(-int(sizes[0]) // size))
        # [chunks of the longest, sequences]: whether the sequence has a chunk of this number.
        has = numbers[:, None] * size < sizes
        number, sequence = has.nonzero().unbind(1)
        inside = number[:, None] * size + torch.arange(size)
        longest = sizes[sequence, None]
        slots = starts[sequence, None] + torch.minimum(inside, longest - 1)
        real = inside < longest
        restore = torch.empty(int(sizes.sum()), dtype=torch.int64)
        restore[slots[real]] = torch.arange(slots.numel()).view_as(slots)[real]
        counts = torch.tensor(lengths)
        return cls(
            slots.to(device),
            tuple(has.sum(1).tolist()),
            restore.to(device),
            torch.arange(len(counts)).repeat_interleave(counts).to(device),
        )
