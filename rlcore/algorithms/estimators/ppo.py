"""Generalised advantage estimation: PPO with a critic, and VAPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.ragged import add_, last_token_index, segment_lengths
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.reward_shaping import (
    ShapedEstimator,
    check_unit_interval,
    require,
    shaped_rewards,
)
from rlcore.algorithms.scan import discounted_suffix_sum, discounted_suffix_sum_
from rlcore.algorithms.types import Advantages, EstimatorInputs

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


@register_estimator(
    "vapo",
    needs={"values"},
    shaped_rewards=True,
    normalization="batch",
    formula="GAE with lambda = 1 - 1 / (alpha * length) for the actor, critic_lam for the critic",
    source="Yue et al., arXiv:2504.05118",
)
class VAPO(ShapedEstimator):
    """Decoupled, length-adaptive GAE over the trainable tokens of each sequence.

        delta_t = r_t + gamma * V_{t+1} - V_t                     as in `ppo`
        A_t     = delta_t + gamma * lambda * A_{t+1}              lambda = actor_lam, or by default
                                                                  1 - 1 / (alpha * length), clamped
                                                                  to [0, 1]
        returns = C_t + V_t,  C_t = delta_t + gamma * critic_lam * C_{t+1}

    With critic_lam 1 the critic learns Monte-Carlo returns, unbiased however long the sequence. The
    actor's lambda keeps the sum of its weights at alpha * length (the length in trainable tokens),
    so that the reward at the end reaches the first token of a long sequence and the variance of a
    short one stays low; up to 1 / alpha tokens (20 by default) lambda is 0. With actor_lam equal to
    critic_lam it is `ppo`.

    Y. Yue et al., "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning
    Tasks", arXiv:2504.05118; the decoupled lambdas: VC-PPO, arXiv:2503.01491.
    """

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        critic_lam: float = 1.0,
        actor_lam: float | None = None,
        alpha: float = 0.05,
        kl_coef: float = 0.0,
        distill_coef: float = 0.0,
    ) -> None:
        check_unit_interval("gamma", gamma)
        check_unit_interval("critic_lam", critic_lam)
        if actor_lam is not None:
            check_unit_interval("actor_lam", actor_lam)
        if not 0.0 < alpha < float("inf"):
            raise ValueError(f"alpha: expected a number > 0, got {alpha}")
        super().__init__(kl_coef=kl_coef, distill_coef=distill_coef)
        self.gamma = gamma
        self.critic_lam = critic_lam
        self.actor_lam = actor_lam
        self.alpha = alpha

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        values = require(inputs.values, "values")
        rewards = shaped_rewards(inputs, self.kl_coef, self.distill_coef)
        delta = temporal_differences_(rewards, values, inputs.cu_seqlens, self.gamma)
        advantages = discounted_suffix_sum(
            delta, inputs.cu_seqlens, self._actor_decay(inputs.cu_seqlens)
        )
        returns = add_(
            discounted_suffix_sum_(delta, inputs.cu_seqlens, self.gamma * self.critic_lam), values
        )
        dtype = inputs.rewards.dtype
        return Advantages(advantages.to(dtype), returns=returns.to(dtype))

    def _actor_decay(self, cu_seqlens: Tensor) -> float | Tensor:
        """`gamma * lambda` of the actor: a number, or float64 `[B]`."""
        if self.actor_lam is not None:
            return self.gamma * self.actor_lam
        lengths = segment_lengths(cu_seqlens).to(torch.float64)
        return self.gamma * (1.0 - 1.0 / (self.alpha * lengths)).clamp(0.0, 1.0)
