"""KL-Cov: a KL penalty on the tokens of the highest covariance keeps the entropy up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.losses import covariance
from rlcore.algorithms.losses.surrogate import ratio_metrics
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor


@register_policy_loss(
    "kl_cov",
    needs={"sequence_ids"},
    formula="-A r, plus ppo_kl_coef * |log r| on the kl_cov_ratio of all tokens whose covariance "
    "is highest",
    source="Cui et al., arXiv:2505.22617",
)
class KLCov:
    """Surrogate without a clip, and a KL penalty on the tokens whose covariance of log-prob and
    advantage is highest.

        cov_t = (A_t - mean of A) * (old_logprobs_t - mean of old_logprobs)
        S     = the max(floor(kl_cov_ratio * tokens of the step), 1) tokens of highest cov_t,
                of those with cov_t > 0
        r     = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 before exp
        l_t   = -A r + ppo_kl_coef * |log r|  in S, else -A r

    The means are over the optimizer step.

    S is fixed once an optimizer step, by `batch_stats`. Of tokens with equal covariance those with
    the smaller hash of (sequence, position) come first, so S depends neither on the split nor on
    the order. Only a positive covariance lowers the entropy: where all advantages are equal, or
    there is one token, S is empty.

    The paper asks for KL(old || policy); its code and verl's take |log r|, which pulls a token back
    from either side. We take that too. Its gradient at r = 1 is 0, so the first update of a batch
    is not penalised. The same code ranks once a *micro-batch*, by the log-probs of the current
    policy, and penalises at least one token of each.

    Metrics, all `[M]`: `ratio`, `approxkl`, `covariance`, and `cov_klfrac` (1 in S).

    G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    arXiv:2505.22617.
    """

    def __init__(self, *, kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 1.0) -> None:
        covariance.check_ratio("kl_cov_ratio", kl_cov_ratio)
        if not 0.0 <= ppo_kl_coef < float("inf"):
            raise ValueError(f"ppo_kl_coef: expected a number >= 0, got {ppo_kl_coef}")
        self.ratio = kl_cov_ratio
        self.ppo_kl_coef = ppo_kl_coef

    def batch_stats(self, inputs: PolicyLossInputs) -> dict[str, Tensor]:
        """Return the means, the lowest covariance in S, and the last draw in S at it."""
        means = covariance.step_means(inputs)
        cov = covariance.token_covariance(inputs, means)
        positive = cov[cov > 0]
        count = min(covariance.count_of(self.ratio, inputs), positive.numel())
        if count == 0:
            lowest = cov.new_tensor(float("inf"))
            ties = 0
        else:
            lowest = positive.kthvalue(positive.numel() - count + 1).values
            ties = count - int((positive > lowest).sum())
        last_draw = covariance.last_draw(covariance.token_draws(inputs)[cov == lowest], ties)
        return {**means, "lowest_covariance": lowest, "last_draw": last_draw}

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        assert inputs.batch_stats is not None
        stats = inputs.batch_stats
        cov = covariance.token_covariance(inputs, stats)
        tied = (cov == stats["lowest_covariance"]) & (
            covariance.token_draws(inputs) <= stats["last_draw"]
        )
        chosen = (cov > stats["lowest_covariance"]) | tied
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        penalty = torch.where(chosen, self.ppo_kl_coef * log_ratio.abs(), 0.0)
        loss = penalty - inputs.advantages * log_ratio.exp()
        metrics = {"covariance": cov.to(loss.dtype), "cov_klfrac": chosen.to(loss.dtype)}
        return PolicyLoss(loss, {**ratio_metrics(log_ratio), **metrics})
