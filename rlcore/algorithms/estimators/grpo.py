"""Advantages of a sequence relative to its group, one number for all of its tokens."""

from __future__ import annotations

import torch

from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.reward_shaping import ShapedEstimator, shaped_returns
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator(
    "grpo",
    compares_group=True,
    formula="A = (R - mean of the group) / (std of the group + eps)",
    source="Shao et al., arXiv:2402.03300",
)
class GRPO:
    """The reward of a sequence against those of its group, in units of their spread, on each of its
    tokens.

        A_t = (R - mean of the group) / (std of the group + eps)      std with n - 1
        A_t =  R - mean of the group                                  where normalize_std is False

    With leave_one_out the baseline is the mean of the *others*: n / (n - 1) * (R - mean) replaces
    R - mean. Only the baseline leaves the sample out; the std is that of the whole group. The
    advantage is 0 in a group of one, and where all rewards are equal.

    Z. Shao et al., "DeepSeekMath", arXiv:2402.03300; the leave-one-out baseline: arXiv:2402.14740.
    """

    def __init__(
        self, *, normalize_std: bool = True, eps: float = 1e-6, leave_one_out: bool = False
    ) -> None:
        if not 0.0 < eps < float("inf"):
            raise ValueError(f"eps: expected a number > 0, got {eps}")
        self.normalize_std = normalize_std
        self.eps = eps
        self.leave_one_out = leave_one_out

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        scores = group.leave_one_out if self.leave_one_out else group.residuals
        return group.advantages(scores / (group.stds + self.eps) if self.normalize_std else scores)


@register_estimator(
    "dr_grpo",
    compares_group=True,
    formula="A = R - mean of the group",
    source="Liu et al., arXiv:2503.20783",
)
class DrGRPO:
    """The reward of a sequence less the mean of its group, on each of its tokens.

        A_t = R - mean of the group

    Dividing by the std, as GRPO does, weighs prompts that are nearly solved or nearly hopeless more
    than the others. The other half of the method, a constant in place of the length of a sequence,
    is the aggregation `seq-mean-token-sum-norm`. In a group of one the advantage is 0.

    Z. Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        return group.advantages(group.residuals)


@register_estimator(
    "rloo",
    shaped_rewards=True,
    compares_group=True,
    formula="A = G - mean of the others' G;  G = R - kl_coef * sum of kl_t",
    source="Ahmadian et al., arXiv:2402.14740",
)
class RLOO(ShapedEstimator):
    """The return of a sequence less the mean of those of the *others* in its group, on each of its
    tokens.

        G   = reward of the sequence + sum over its tokens of
              (token_rewards_t - kl_coef * kl_t + distill_coef * (teacher_logprobs_t - logprobs_t))
        A_t = G - mean of the G of the others  =  n / (n - 1) * (G - mean of the group)

    The sequence is one action: its whole KL is part of its return, and of the baseline of the
    others. In a group of one there are no others, and the advantage is 0.

    A. Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
    Human Feedback in LLMs", arXiv:2402.14740.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs, shaped_returns(inputs, self.kl_coef, self.distill_coef))
        return group.advantages(group.leave_one_out)


@register_estimator(
    "opo",
    compares_group=True,
    formula="A = R - sum(length * R) / sum(length), sums over the group",
    source="Hao et al., arXiv:2505.23585",
)
class OPO:
    """The reward of a sequence less the mean of its group weighted by length, on each of its
    tokens.

        b   = sum of l_i * R_i / sum of l_i          over the group; l_i counts trainable tokens
        A_t = R - b

    b minimises the variance of the gradient where the squared norm of a sequence's score grows with
    its length. In a group of one the advantage is 0. The paper trains strictly on-policy: one
    optimizer step a batch.

    Y. Hao et al., "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        lengths = group.lengths.double()
        # R - b from residuals, which are exactly 0 where the rewards are equal, and so is the
        # difference
        offset = group.total(lengths * group.residuals) / group.total(lengths)
        return group.advantages(group.residuals - offset)


@register_estimator(
    "gpg",
    compares_group=True,
    formula=(
        "A = alpha * (R - mean of the group);  alpha = samples / samples of groups whose rewards"
        " differ"
    ),
    source="Chu et al., arXiv:2504.02546",
)
class GPG:
    """The reward of a sequence less the mean of its group, scaled up for the samples without a
    gradient.

        alpha = samples / samples in groups whose rewards differ      over the whole batch
        A_t   = alpha * (R - mean of the group)                       F_norm = 1 of the paper

    A group that is all right or all wrong adds nothing to the gradient but counts in its mean;
    alpha (the paper's B / (B - M)) takes it out again. So advantages depend on the whole batch.
    verl counts *rewards* that are not 0 instead of groups with a gradient, which on 0/1 rewards
    also scales by how hard the prompts are. Groups of one have no gradient: their advantage is 0.
    Where no group has a gradient, alpha is 1. Rollout filters take the place of the paper's
    resampling of thin batches.

    X. Chu et al., "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
    arXiv:2504.02546.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        with_gradient = (group.total(group.residuals.abs()) > 0).double()
        alpha = with_gradient.numel() / with_gradient.sum().clamp(min=1)
        return group.advantages(alpha * group.residuals)


@register_estimator(
    "max_rl",
    compares_group=True,
    formula="A = (R - mean of the group) / mean of the group",
    source="Tajwar et al., arXiv:2602.02710",
)
class MaxRL:
    """The reward of a sequence less the mean of its group, in units of that mean, on each of its
    tokens.

        A_t = (R - mean of the group) / mean of the group          0 where the mean is not positive

    With rewards of 0 and 1 and n samples a prompt it follows the gradient of the log success rate,
    cut off at order n of its expansion in pass@k (order 1 is REINFORCE, no cut is maximum
    likelihood): a prompt counts for more the harder it is. The paper defines it for such rewards;
    any that are >= 0 make sense. A group whose mean is negative has no success rate: dividing by it
    would turn the gradient around, so it counts as one without a success. In a group of one the
    advantage is 0.

    F. Tajwar et al., "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        means = group.means
        return group.advantages(torch.where(means <= 0, 0.0, group.residuals / means))
