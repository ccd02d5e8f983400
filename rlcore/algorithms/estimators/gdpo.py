"""Group-relative advantages of each part of the reward apart, for GDPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.errors import InputError
from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.ragged import expand_to_tokens, segment_lengths
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.reward_shaping import require
from rlcore.algorithms.types import Advantages, EstimatorInputs

if TYPE_CHECKING:
    from torch import Tensor


@register_estimator(
    "gdpo",
    needs={"reward_parts"},
    compares_group=True,
    formula="A = (S - mean of the batch) / (std of the batch + eps);"
    "  S = sum over parts of weight * (R - mean of the group) / (std of the group + eps)",
    source="Liu et al., arXiv:2601.05242",
)
class GDPO:
    """Each part of the reward relative to its group, in units of its spread there; then the
    weighted sum of the parts relative to the batch.

        S   = sum over parts of w_k (R_k - mean of the group) / (std of the group + eps)
        A_t = (S - mean of the batch) / (std of the batch + eps)        std with n - 1

    So a part with a large scale does not drown the others, as it does in the std of a sum. Means
    and stds are over sequences, in the batch too, as in the paper's equations 4 to 6 (verl's first
    version weighs a sequence by its length there). A part that gave a sample no score (NaN: the
    part is for other sources, or failed) adds nothing to its sum, and the sample is no member of
    the group for that part. A group of one has S = 0.

    Args:
        reward_weights: w_k, by column of `reward_parts`; default: 1 each.

    S. Liu et al., "GDPO", arXiv:2601.05242.
    """

    def __init__(self, *, reward_weights: Sequence[float] | None = None, eps: float = 1e-6) -> None:
        if not 0.0 < eps < float("inf"):
            raise ValueError(f"eps: expected a number > 0, got {eps}")
        self.reward_weights = reward_weights
        self.eps = eps

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        parts = require(inputs.reward_parts, "reward_parts")
        weights = [1.0] * parts.shape[1] if self.reward_weights is None else self.reward_weights
        if len(weights) != parts.shape[1]:
            raise InputError(
                f"gdpo: reward_weights has {len(weights)} numbers, reward_parts has"
                f" {parts.shape[1]} columns"
            )
        counted = segment_lengths(inputs.cu_seqlens) > 0
        total = torch.zeros(inputs.num_sequences, dtype=torch.float64, device=parts.device)
        for weight, column in zip(weights, parts.double().unbind(1)):
            member = counted & ~column.isnan()
            group = GroupedReturns(inputs, column, member)
            scores = weight * group.residuals / (group.stds + self.eps)
            total[member] += group.per_sequence(scores)
        # The statistics of the batch count each rollout once.
        batch = GroupedReturns(inputs, total, counted)
        total[counted] = batch.per_sequence(self._whitened(batch.returns))
        advantages = expand_to_tokens(total, inputs.cu_seqlens, inputs.num_tokens)
        return Advantages(advantages.to(inputs.rewards.dtype))

    def _whitened(self, scores: Tensor) -> Tensor:
        """Bring the scores of the batch to mean 0 and std 1, `[N]`; a single one becomes 0."""
        if not scores.numel():
            return scores
        centred = scores - scores.mean()
        variance = centred.square().sum() / max(scores.numel() - 1, 1)
        return centred / (variance.sqrt() + self.eps)
