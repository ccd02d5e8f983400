"""Rollouts: the segments that one run of a workflow left count once in every statistic.

A conversation that was cut, compacted or branched comes as several sequences of one batch, its
segments. They share their outcome and their group. In a batch the segments of a rollout stand in
the order in which they were made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.errors import InputError
from rlcore.algorithms.ragged import group_index
from rlcore.algorithms.scan import discounted_suffix_sum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of S sequences: R of them, numbered from 0."""

    index: Tensor  # int64 [S], the rollout of each sequence
    first: Tensor  # int64 [R], the first sequence of each rollout
    last: Tensor  # int64 [R], the last sequence of each rollout

    @classmethod
    def of(cls, rollout_ids: Tensor | None) -> Rollouts | None:
        """Number the rollouts; None where every sequence is a rollout of its own."""
        if rollout_ids is None:
            return None
        index, count = group_index(rollout_ids)
        if count == index.numel():
            return None
        places = torch.arange(index.numel(), device=index.device)
        first = places.new_full((count,), index.numel())
        first = first.scatter_reduce(0, index, places, "amin")
        last = places.new_zeros(count).scatter_reduce(0, index, places, "amax")
        return cls(index, first, last)

    @property
    def count(self) -> int:
        """R."""
        return self.first.numel()

    def total(self, per_sequence: Tensor) -> Tensor:
        """Sum a vector `[S]` over the segments of each rollout: `[R]`."""
        return per_sequence.new_zeros(self.count).index_add(0, self.index, per_sequence)

    def shared(self, per_sequence: Tensor, name: str) -> Tensor:
        """Return the value `[R]` that the segments of each rollout have in common.

        Raises:
            InputError: segments of one rollout differ.
        """
        values = per_sequence[self.first]
        same = per_sequence == values[self.index]
        if per_sequence.is_floating_point():
            same |= per_sequence.isnan() & values[self.index].isnan()
        if not bool(same.all()):
            other = int((~same).nonzero()[0])
            head = int(self.first[self.index[other]])
            raise InputError(
                f"{name}: expected one value for all segments of a rollout (equal rollout_ids), got"
                f" {per_sequence[head].item()} for sequence {head} and"
                f" {per_sequence[other].item()} for sequence {other}"
            )
        return values

    def later(self, per_sequence: Tensor) -> Tensor:
        """Sum a vector `[S]` over the segments of the same rollout that were made later: `[S]`."""
        order = torch.argsort(self.index, stable=True)
        sizes = torch.bincount(self.index, minlength=self.count)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        along = per_sequence[order]
        sums = torch.empty_like(along)
        sums[order] = discounted_suffix_sum(along, offsets, 1.0) - along
        return sums
