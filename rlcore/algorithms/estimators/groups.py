"""What the estimators that compare samples of one prompt share: the members of each group, and their returns."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.algorithms.ragged import expand_to_tokens, group_index, segment_lengths
from rlcore.algorithms.types import Advantages, EstimatorInputs


class GroupedReturns:
    """The returns of the N sequences that have a trainable token, beside those of their groups.

    A sequence without trainable tokens is no member of its group: it has nothing to credit, and is often an aborted
    one whose reward means nothing (it may be NaN). Everything is float64, so that rewards of 1e4 that differ by 1e-2
    keep their differences.

    Args:
        inputs: groups come from `group_ids` alone.
        returns: float64 `[B]` in place of `inputs.rewards`.
    """

    returns: Tensor  # float64 [N]
    lengths: Tensor  # int64 [N]
    sizes: Tensor  # int64 [N], members of the group of each member
    residuals: Tensor  # float64 [N], return less the mean of its group; exactly 0 where those of the group are equal

    def __init__(self, inputs: EstimatorInputs, returns: Tensor | None = None) -> None:
        lengths = segment_lengths(inputs.cu_seqlens)
        returns = inputs.rewards.double() if returns is None else returns
        group_ids, cu_seqlens, member = inputs.group_ids, inputs.cu_seqlens, lengths > 0
        if not bool(member.all()):
            lengths, returns, group_ids = lengths[member], returns[member], group_ids[member]
            cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        self.returns, self.lengths = returns, lengths
        self._cu_seqlens, self._dtype, self._num_tokens = cu_seqlens, inputs.rewards.dtype, inputs.num_tokens
        self._index, self._num_groups = group_index(group_ids)
        self.sizes = torch.bincount(self._index, minlength=self._num_groups).index_select(0, self._index)
        # counted from the least return of its group, a constant is a row of zeros, whose mean is exact
        least = returns.new_full((self._num_groups,), float("inf")).scatter_reduce(0, self._index, returns, "amin")
        above = returns - least.index_select(0, self._index)
        self.residuals = above - self.total(above) / self.sizes

    @property
    def means(self) -> Tensor:
        """Mean return of the group of each member, `[N]`."""
        return self.returns - self.residuals

    @property
    def stds(self) -> Tensor:
        """Unbiased, two-pass standard deviation of the group of each member, `[N]`; 0 in a group of one."""
        return (self.total(self.residuals.square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    @property
    def leave_one_out(self) -> Tensor:
        """Return of each member less the mean of the *others* of its group, `[N]`; 0 in a group of one.

        r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean)
        """
        return self.residuals * (self.sizes / (self.sizes - 1).clamp(min=1))

    def total(self, x: Tensor) -> Tensor:
        """Sum `x` (`[N]`) over the group of each member, `[N]`."""
        return x.new_zeros(self._num_groups).index_add(0, self._index, x).index_select(0, self._index)

    def per_token(self, x: Tensor) -> Tensor:
        """Repeat `x` (`[N]`) on each token of its member: `[M]`, in the dtype of the rewards."""
        return expand_to_tokens(x.to(self._dtype), self._cu_seqlens, self._num_tokens)

    def advantages(self, x: Tensor) -> Advantages:
        """Give every token of a member the advantage `x` (`[N]`). No returns: there is no critic to learn them."""
        return Advantages(self.per_token(x))
