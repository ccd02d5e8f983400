"""Groups of rollouts of one prompt and their returns, for the estimators that compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.ragged import group_index, segment_lengths
from rlcore.algorithms.rollouts import Rollouts
from rlcore.algorithms.types import Advantages, EstimatorInputs

if TYPE_CHECKING:
    from torch import Tensor


class GroupedReturns:
    """The returns of the N rollouts that have a trainable token, and statistics of their groups.

    A sequence is a rollout, unless `rollout_ids` says that several are segments of one. A sequence
    without trainable tokens is no member of its group: it has nothing to credit, and is often an
    aborted one whose reward means nothing (it may be NaN). Everything is float64, so that rewards
    of 1e4 that differ by 1e-2 keep their differences.

    Args:
        inputs: the batch; groups come from its `group_ids` alone.
        returns: float64 `[B]` instead of `inputs.rewards`; equal for the segments of a rollout.
        member: bool `[B]`, the sequences that count; default: those with a trainable token.

    Raises:
        InputError: segments of one rollout differ in their return or group.
    """

    returns: Tensor  # float64 [N]
    groups: Tensor  # int64 [N], group numbers from 0
    lengths: Tensor  # int64 [N], trainable tokens
    # float64 [N], return less the mean of its group; exactly 0 where those of the group are equal
    residuals: Tensor

    def __init__(
        self, inputs: EstimatorInputs, returns: Tensor | None = None, member: Tensor | None = None
    ) -> None:
        lengths = segment_lengths(inputs.cu_seqlens)
        returns = inputs.rewards.double() if returns is None else returns
        group_ids = inputs.group_ids
        rollout_ids = inputs.rollout_ids
        if member is None and lengths.numel() and int(lengths.min()) == 0:
            member = lengths > 0
        if member is not None:
            lengths = lengths[member]
            returns = returns[member]
            group_ids = group_ids[member]
            rollout_ids = None if rollout_ids is None else rollout_ids[member]
        self._segment_lengths = lengths
        self._rollouts = rollouts = Rollouts.of(rollout_ids)
        if rollouts is not None:
            returns = rollouts.shared(returns, "rewards")
            group_ids = rollouts.shared(group_ids, "group_ids")
            lengths = rollouts.total(lengths)
        self.returns = returns
        self.lengths = lengths
        self._dtype = inputs.rewards.dtype
        self._num_tokens = inputs.num_tokens
        self.groups, self._num_groups = group_index(group_ids)
        self._group_sizes = torch.bincount(self.groups, minlength=self._num_groups).double()
        # Relative to the least return of their group, equal returns are zeros, whose mean is exact.
        least = returns.new_full((self._num_groups,), float("inf")).scatter_reduce(
            0, self.groups, returns, "amin"
        )
        above = returns - self._per_member(least)
        self.residuals = above - self._per_member(self._group_total(above) / self._group_sizes)

    @property
    def means(self) -> Tensor:
        """Mean return of the group of each member, `[N]`."""
        return self.returns - self.residuals

    @property
    def stds(self) -> Tensor:
        """Unbiased, two-pass std of each member's group, `[N]`; 0 in a group of one."""
        variance = self._group_total(self.residuals.square()) / (self._group_sizes - 1).clamp(min=1)
        return self._per_member(variance.sqrt())

    @property
    def leave_one_out(self) -> Tensor:
        """Return of each member less the mean of the *others*, `[N]`; 0 in a group of one.

        r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean)
        """
        return self.residuals * self._per_member(
            self._group_sizes / (self._group_sizes - 1).clamp(min=1)
        )

    def total(self, x: Tensor) -> Tensor:
        """Sum `x` (`[N]`) over the group of each member, `[N]`."""
        return self._per_member(self._group_total(x))

    def per_sequence(self, x: Tensor) -> Tensor:
        """Repeat `x` (`[N]`) on each sequence of its member, in the order of the batch."""
        return x if self._rollouts is None else x[self._rollouts.index]

    def per_token(self, x: Tensor) -> Tensor:
        """Repeat `x` (`[N]`) on each token of its member: `[M]`."""
        return torch.repeat_interleave(
            self.per_sequence(x), self._segment_lengths, output_size=self._num_tokens
        )

    def advantages(self, x: Tensor) -> Advantages:
        """Give each token of a member its advantage `x` (`[N]`), in the dtype of the rewards.

        There are no returns, which are for a critic to learn.
        """
        return Advantages(self.per_token(x.to(self._dtype)))

    def _group_total(self, x: Tensor) -> Tensor:
        return x.new_zeros(self._num_groups).scatter_add(0, self.groups, x)

    def _per_member(self, per_group: Tensor) -> Tensor:
        return per_group.index_select(0, self.groups)
