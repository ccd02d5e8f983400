"""Reward-to-go against the reward of a greedy sample, for ReMax."""

from __future__ import annotations

from rlcore.algorithms.ragged import expand_to_tokens
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.reward_shaping import ShapedEstimator, require, shaped_rewards
from rlcore.algorithms.scan import discounted_suffix_sum_
from rlcore.algorithms.types import Advantages, EstimatorInputs


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
