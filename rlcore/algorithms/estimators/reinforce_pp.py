"""Rewards to go without a critic: REINFORCE++, its group baseline, and ReMax."""

from __future__ import annotations

from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.ragged import expand_to_tokens
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.reward_shaping import (
    ShapedEstimator,
    check_unit_interval,
    require,
    shaped_rewards,
    token_terms,
)
from rlcore.algorithms.scan import discounted_suffix_sum_
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator(
    "reinforce++",
    shaped_rewards=True,
    normalization="batch",
    formula="A_t = r_t + gamma * A_{t+1};  r_t = -kl_coef * kl_t, plus R on the last token",
    source="Hu et al., arXiv:2501.03262",
)
class ReinforcePP(ShapedEstimator):
    """The discounted sum to go of the shaped rewards, on the trainable tokens of each sequence.

        r_t = token_rewards_t - kl_coef * kl_t + distill_coef * (teacher_logprobs_t - logprobs_t)
              + (reward of the sequence, where t is its last token)
        A_t = returns_t = r_t + gamma * A_{t+1}

    The outcome reaches every turn of a multi-turn sequence. Whitening over the batch, which the
    paper asks for, is the step after the estimator (`algorithm.normalize_advantages`).

    J. Hu et al., "REINFORCE++", arXiv:2501.03262.
    """

    def __init__(
        self, *, gamma: float = 1.0, kl_coef: float = 0.0, distill_coef: float = 0.0
    ) -> None:
        check_unit_interval("gamma", gamma)
        super().__init__(kl_coef=kl_coef, distill_coef=distill_coef)
        self.gamma = gamma

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        rewards = shaped_rewards(inputs, self.kl_coef, self.distill_coef)
        returns = discounted_suffix_sum_(rewards, inputs.cu_seqlens, self.gamma).to(
            inputs.rewards.dtype
        )
        return Advantages(returns, returns=returns)


@register_estimator(
    "reinforce++_baseline",
    shaped_rewards=True,
    compares_group=True,
    normalization="batch",
    formula="A_t = (R - mean of the group) - kl_coef * kl_t",
    source="Hu et al., arXiv:2501.03262",
)
class ReinforcePPBaseline(ShapedEstimator):
    """The reward of a sequence less the mean of its group, and on each token what that token alone
    earns or costs.

        A_t = (R - mean of the group) + token_rewards_t - kl_coef * kl_t
              + distill_coef * (teacher_logprobs_t - logprobs_t)

    The per-token terms are not accumulated: a token answers for its own KL, not for that of the
    tokens behind it. In a group of one R - mean is 0, and the per-token terms remain. Whitening
    over the batch, which takes the place of the std of a group, is the step after the estimator
    (`algorithm.normalize_advantages`). The paper itself moves the KL of this variant into the loss
    (`algorithm.kl.loss_coef`, k2); kl_coef is the form that keeps it in the reward.

    J. Hu et al., "REINFORCE++", arXiv:2501.03262.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        terms = token_terms(inputs, self.kl_coef, self.distill_coef)
        if terms is None:
            return group.advantages(group.residuals)
        return Advantages(terms.add_(group.per_token(group.residuals)).to(inputs.rewards.dtype))


@register_estimator(
    "remax",
    needs={"baseline_rewards"},
    shaped_rewards=True,
    formula="A_t = r_t + r_{t+1} + ... - baseline_rewards;  r_t = -kl_coef * kl_t, plus R on the "
    "last token",
    source="Li et al., arXiv:2310.10505",
)
class ReMax(ShapedEstimator):
    """The sum to go of the shaped rewards, less the reward of a baseline (greedy) sample of the
    same prompt.

        r_t       = token_rewards_t - kl_coef * kl_t
                    + distill_coef * (teacher_logprobs_t - logprobs_t)
                    + (reward of the sequence, where t is its last token)
        returns_t = r_t + returns_{t+1}
        A_t       = returns_t - baseline_rewards of the sequence

    Nothing is discounted: the reward is that of the whole sequence, and a discount would shrink it
    but not the baseline. (The authors' program differs from their paper: its gamma discounts the
    difference, and a token pays for its own KL alone.) Groups play no part; a sample alone has its
    baseline.

    Z. Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for
    Aligning Large Language Models", arXiv:2310.10505.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        rewards = shaped_rewards(inputs, self.kl_coef, self.distill_coef)
        returns = discounted_suffix_sum_(rewards, inputs.cu_seqlens, 1.0)
        baseline = require(inputs.baseline_rewards, "baseline_rewards")
        advantages = returns - expand_to_tokens(baseline, inputs.cu_seqlens, inputs.num_tokens)
        dtype = inputs.rewards.dtype
        return Advantages(advantages.to(dtype), returns=returns.to(dtype))
