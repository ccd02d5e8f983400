"""Generalised advantage estimation, for PPO with a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.algorithms.ragged import last_token_index
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.reward_shaping import (
    ShapedEstimator,
    check_unit_interval,
    require,
    shaped_rewards,
)
from rlcore.algorithms.scan import discounted_suffix_sum_
from rlcore.algorithms.types import Advantages, EstimatorInputs
from rlcore.algorithms.wide import add_

if TYPE_CHECKING:
    from torch import Tensor


@register_estimator(
    "ppo",
    needs={"values"},
    shaped_rewards=True,
    normalization="batch",
    formula="delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1}",
    source="Schulman et al., arXiv:1506.02438; KL in the reward: Ouyang et al., arXiv:2203.02155",
)
class PPO(ShapedEstimator):
    """GAE over the trainable tokens of each sequence.

        r_t     = token_rewards_t - kl_coef * kl_t
                  + distill_coef * (teacher_logprobs_t - logprobs_t)
                  + (reward of the sequence, where t is its last token)
        delta_t = r_t + gamma * V_{t+1} - V_t             with V = 0 behind the last token
        A_t     = delta_t + gamma * lam * A_{t+1}
        returns = A_t + V_t

    t + 1 is the next *trainable* token: the tokens of tools and observations in between are no
    steps of the policy, so they take neither a gamma nor a lambda. The critic's targets come from
    the same rewards, KL included.

    J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", arXiv:1506.02438; KL in the reward: arXiv:2203.02155.
    """

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        lam: float = 0.95,
        kl_coef: float = 0.0,
        distill_coef: float = 0.0,
    ) -> None:
        check_unit_interval("gamma", gamma)
        check_unit_interval("lam", lam)
        super().__init__(kl_coef=kl_coef, distill_coef=distill_coef)
        self.gamma = gamma
        self.lam = lam

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        values = require(inputs.values, "values")
        rewards = shaped_rewards(inputs, self.kl_coef, self.distill_coef)
        delta = temporal_differences_(rewards, values, inputs.cu_seqlens, self.gamma)
        wide = discounted_suffix_sum_(delta, inputs.cu_seqlens, self.gamma * self.lam)
        dtype = inputs.rewards.dtype
        advantages = wide.to(dtype, copy=True)
        return Advantages(advantages, returns=add_(wide, values).to(dtype))


def temporal_differences_(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float
) -> Tensor:
    """Turn `rewards` into `r_t + gamma * V_{t+1} - V_t`, with V = 0 behind the last token.

    Args:
        rewards: float64 `[M]`, changed in place and returned.
        values: float `[M]`, of the state before each token.
    """
    delta = add_(rewards, values, -1.0)
    last = last_token_index(cu_seqlens)
    ends = delta[last]
    add_(delta[:-1], values[1:], gamma)
    # Restored rather than subtracted again: a huge or infinite value of the next sequence must
    # leave no trace here.
    return delta.index_copy_(0, last, ends)
