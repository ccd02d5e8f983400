"""Clip-Cov and KL-Cov keep the entropy up: they choose tokens by log-prob and advantage.

A token's covariance is `(advantage - mean) * (old log-prob - mean)`, the means over all tokens of
the step. Its mean is the covariance proper, whose size is how fast the step lowers the entropy.
`batch_stats` of the losses keeps the two means and a threshold, three or four numbers; from them
every micro-batch recomputes the covariances of its tokens bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.losses.surrogate import check_clip, clipped_surrogate, ratio_metrics
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.token_hash import token_uniform
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor

NO_DRAW = -1.0  # below every draw; as the last draw, it chooses no token


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
        _check_ratio("clip_cov_ratio", clip_cov_ratio)
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
        means = _step_means(inputs)
        eligible = self._eligible(_token_covariance(inputs, means))
        draws = _token_draws(inputs)[eligible]
        count = min(_count_of(self.ratio, inputs), draws.numel())
        return {**means, "last_draw": _last_draw(draws, count)}

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        assert inputs.batch_stats is not None
        cov = _token_covariance(inputs, inputs.batch_stats)
        chosen = self._eligible(cov) & (_token_draws(inputs) <= inputs.batch_stats["last_draw"])
        # Without an advantage, chosen tokens have no loss, no gradient and nothing to clip.
        advantages = torch.where(chosen, 0.0, inputs.advantages)
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        loss, clips = clipped_surrogate(log_ratio.exp(), advantages, self.clip_low, self.clip_high)
        metrics = {"covariance": cov.to(loss.dtype), "cov_clipfrac": chosen.to(loss.dtype)}
        return PolicyLoss(loss, {**ratio_metrics(log_ratio), **clips, **metrics})

    def _eligible(self, cov: Tensor) -> Tensor:
        return (cov > self.lower) & (cov < self.upper)


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
        _check_ratio("kl_cov_ratio", kl_cov_ratio)
        if not 0.0 <= ppo_kl_coef < float("inf"):
            raise ValueError(f"ppo_kl_coef: expected a number >= 0, got {ppo_kl_coef}")
        self.ratio = kl_cov_ratio
        self.ppo_kl_coef = ppo_kl_coef

    def batch_stats(self, inputs: PolicyLossInputs) -> dict[str, Tensor]:
        """Return the means, the lowest covariance in S, and the last draw in S at it."""
        means = _step_means(inputs)
        cov = _token_covariance(inputs, means)
        positive = cov[cov > 0]
        count = min(_count_of(self.ratio, inputs), positive.numel())
        if count == 0:
            lowest = cov.new_tensor(float("inf"))
            ties = 0
        else:
            lowest = positive.kthvalue(positive.numel() - count + 1).values
            ties = count - int((positive > lowest).sum())
        last_draw = _last_draw(_token_draws(inputs)[cov == lowest], ties)
        return {**means, "lowest_covariance": lowest, "last_draw": last_draw}

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        assert inputs.batch_stats is not None
        stats = inputs.batch_stats
        cov = _token_covariance(inputs, stats)
        tied = (cov == stats["lowest_covariance"]) & (_token_draws(inputs) <= stats["last_draw"])
        chosen = (cov > stats["lowest_covariance"]) | tied
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        penalty = torch.where(chosen, self.ppo_kl_coef * log_ratio.abs(), 0.0)
        loss = penalty - inputs.advantages * log_ratio.exp()
        metrics = {"covariance": cov.to(loss.dtype), "cov_klfrac": chosen.to(loss.dtype)}
        return PolicyLoss(loss, {**ratio_metrics(log_ratio), **metrics})


# --- the choice of tokens -------------------------------------------------------------------------


def _step_means(inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return `advantage_mean` and `logprob_mean` of the whole step, float64; 0 of no tokens."""
    return {
        "advantage_mean": _mean(_as_held(inputs.advantages)),
        "logprob_mean": _mean(_as_held(inputs.old_logprobs)),
    }


def _token_covariance(inputs: PolicyLossInputs, means: Mapping[str, Tensor]) -> Tensor:
    """Return the covariance of each token, float64 `[M]`, elementwise: the same in every split."""
    advantages = _as_held(inputs.advantages)
    logprobs = _as_held(inputs.old_logprobs)
    return (advantages - means["advantage_mean"]) * (logprobs - means["logprob_mean"])


def _token_draws(inputs: PolicyLossInputs) -> Tensor:
    """Return the random number in [0, 1) that belongs to each token, float64 `[M]`."""
    assert inputs.sequence_ids is not None
    return token_uniform(inputs.sequence_ids, inputs.cu_seqlens, inputs.num_tokens)


def _last_draw(draws: Tensor, count: int) -> Tensor:
    """Return the largest of the `count` smallest draws: those up to it are chosen."""
    return draws.kthvalue(count).values if count else draws.new_tensor(NO_DRAW)


def _count_of(ratio: float, inputs: PolicyLossInputs) -> int:
    """Return the number of tokens in a share `ratio` of the step, rounded down, but at least 1."""
    return max(int(ratio * inputs.num_tokens), 1)


def _check_ratio(name: str, ratio: float) -> None:
    """Refuse a share of the tokens outside (0, 1]."""
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{name}: expected a number in (0, 1], got {ratio}")


def _as_held(x: Tensor) -> Tensor:
    """Round to float32, as the ranks have these vectors, before computing in float64."""
    return x.detach().float().double()


def _mean(x: Tensor) -> Tensor:
    """Average in float64, which is exact where all values are equal.

    float64 holds the sum of fewer than 2^29 equal float32 numbers.
    """
    return x.sum() / max(x.numel(), 1)
