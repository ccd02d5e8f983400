"""Group-relative advantages, for GRPO."""

from __future__ import annotations

from rlcore.algorithms.ragged import group_mean_std, segment_lengths
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator("grpo")
class GRPO:
    """The reward of a sequence against those of its group, on each of its tokens.

        A_t     = (R - mean of the group) / (std of the group + eps)      std with n - 1
        A_t     =  R - mean of the group                                  where normalize_std is False
        returns = R

    Groups come from `group_ids`. A sequence without trainable tokens is not a member of its group: it has nothing to
    credit, and is often an aborted one whose reward means nothing. In a group of one the advantage is 0.

    Z. Shao et al., "DeepSeekMath", arXiv:2402.03300; without the std: Dr. GRPO, arXiv:2503.20783.
    """

    def __init__(self, *, normalize_std: bool = True, eps: float = 1e-6) -> None:
        if not 0.0 < eps < float("inf"):
            raise ValueError(f"eps: expected a number > 0, got {eps}")
        self.normalize_std, self.eps = normalize_std, eps

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        lengths = segment_lengths(inputs.cu_seqlens)
        member = lengths > 0
        rewards, groups = inputs.rewards[member], inputs.group_ids[member]
        mean, std = group_mean_std(rewards, groups)
        scores = rewards.double() - mean  # exactly 0 where the rewards of a group are equal, or one
        if self.normalize_std:
            scores = scores / (std + self.eps)
        scores, lengths = scores.to(rewards.dtype), lengths[member]
        return Advantages(scores.repeat_interleave(lengths), returns=rewards.repeat_interleave(lengths))
