"""Ragged rows of indices: ranges, borders, padded rectangles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SMALLEST_BUCKET = 16


def rectangle(flat: Tensor, counts: Tensor, runs: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Some runs of `flat`, padded with their last element: [b, longest], and a mask of the pads.

    The mask is True at elements that are no pads.
    """
    rows = torch.tensor(runs, dtype=torch.int64)
    sizes = counts[rows, None]
    column = torch.arange(int(counts[rows].max()))
    index = borders(counts)[rows, None] + torch.minimum(column, sizes - 1)
    return flat[index], column < sizes


def borders(counts: Tensor) -> Tensor:
    """[n] -> [n+1] running sums from 0."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """The integers from each start on, `counts` of them, one range behind the other."""
    total = int(counts.sum())
    return torch.arange(total) + (starts - borders(counts)[:-1]).repeat_interleave(
        counts, output_size=total
    )


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of lengths that round up to the same of 16, 24, 32, 48, 64, ...

    So at most a third of a bucket is padding.
    """
    buckets: dict[int, list[int]] = {}
    for i, n in enumerate(lengths):
        ceiling = _SMALLEST_BUCKET
        while ceiling < n:
            ceiling = ceiling * 3 // 2 if ceiling & (ceiling - 1) == 0 else ceiling * 4 // 3
        buckets.setdefault(ceiling, []).append(i)
    return [buckets[ceiling] for ceiling in sorted(buckets)]
