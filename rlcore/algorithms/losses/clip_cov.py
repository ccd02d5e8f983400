"""Clip-Cov: a few tokens of high covariance are left out of the update, to keep the entropy up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.losses import covariance
from rlcore.algorithms.losses.surrogate import check_clip, clipped_surrogate, ratio_metrics
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor


@register_policy_loss(
    "clip_cov",
    needs={"sequence_ids"},
    formula="ppo_clip, but 0 on a random clip_cov_ratio of all tokens, taken from those with "
    "clip_cov_lb < cov < clip_cov_ub",
    source="Cui et al., arXiv:2505.22617",
)
class ClipCov:
    """PPO's clipped surrogate without some tokens whose covariance of log-prob and advantage is
    high.

        cov_t = (A_t - mean of A) * (old_logprobs_t - mean of old_logprobs)
        S     = max(floor(clip_cov_ratio * tokens of the step), 1) tokens, or as many as there are,
                drawn from those with clip_cov_lb < cov_t < clip_cov_ub
        l_t   = 0 in S, else max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    The means are over the optimizer step.

    S is fixed once an optimizer step, by `batch_stats`: among the eligible tokens those with the
    smallest hash of (sequence, position). So it depends neither on the split nor on the order nor
    on a generator. Where no token is eligible, S is empty; two tokens of one hash are taken
    together.

    The authors' code, and verl's, differ: they take covariance, count and draw once a
    *micro-batch*, from the log-probs of the current policy, draw with torch's global generator, and
    do not draw tokens that the clip has already stopped. The last cannot be known before the split,
    and costs next to nothing: such a token has no gradient.

    Metrics, all `[M]`: `ratio`, `approxkl`, the clip fractions of `ppo_clip` (outside S),
    `covariance`, and `cov_clipfrac` (1 in S).

    G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    arXiv:2505.22617.
    """

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        clip_cov_ratio: float = 2e-4,
        clip_cov_lb: float = 1.0,
        clip_cov_ub: float = 5.0,
    ) -> None:
        check_clip(clip_low, clip_high)
        covariance.check_ratio("clip_cov_ratio", clip_cov_ratio)
        if not clip_cov_lb < clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb: expected a number < clip_cov_ub ({clip_cov_ub}), got {clip_cov_lb}"
            )
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.ratio = clip_cov_ratio
        self.lower = clip_cov_lb
        self.upper = clip_cov_ub

    def batch_stats(self, inputs: PolicyLossInputs) -> dict[str, Tensor]:
        """Return the means and the last draw that is still in S, float64 scalars."""
        means = covariance.step_means(inputs)
        eligible = self._eligible(covariance.token_covariance(inputs, means))
        draws = covariance.token_draws(inputs)[eligible]
        count = min(covariance.count_of(self.ratio, inputs), draws.numel())
        return {**means, "last_draw": covariance.last_draw(draws, count)}

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        assert inputs.batch_stats is not None
        cov = covariance.token_covariance(inputs, inputs.batch_stats)
        chosen = self._eligible(cov) & (
            covariance.token_draws(inputs) <= inputs.batch_stats["last_draw"]
        )
        # no loss, no gradient, nothing to clip
        advantages = torch.where(chosen, 0.0, inputs.advantages)
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        loss, clips = clipped_surrogate(log_ratio.exp(), advantages, self.clip_low, self.clip_high)
        metrics = {"covariance": cov.to(loss.dtype), "cov_clipfrac": chosen.to(loss.dtype)}
        return PolicyLoss(loss, {**ratio_metrics(log_ratio), **clips, **metrics})

    def _eligible(self, cov: Tensor) -> Tensor:
        return (cov > self.lower) & (cov < self.upper)
