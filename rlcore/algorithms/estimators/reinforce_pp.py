"""Reward-to-go without a critic, for REINFORCE++."""

from __future__ import annotations

from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.reward_shaping import (
    ShapedEstimator,
    check_unit_interval,
    shaped_rewards,
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
