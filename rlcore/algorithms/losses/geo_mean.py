"""Geometric-Mean Policy Optimization: the geometric mean of the clipped ratios of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.kl import clamp_log_ratio, clamped_log_ratio
from rlcore.algorithms.losses.surrogate import mean_of_sequence, ratio_metrics
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor


@register_policy_loss(
    "geo_mean",
    formula=(
        "-A exp(mean over the sequence of d),  d = min(log r, clip_high) where A > 0, max(log r,"
        " -clip_low) where A < 0"
    ),
    source="Zhao et al. (GMPO), arXiv:2507.20673",
)
class GeoMean:
    """Geometric mean of the clipped ratios of a sequence.

        d_t = min(logprobs - old_logprobs, clip_high)      where A_t > 0
              max(logprobs - old_logprobs, -clip_low)      where A_t < 0
              0                                            where A_t = 0
        g   = exp(mean of d over the sequence), the mean clamped to +-20 before exp
        l_t = -A_t g

    The limits are of the *log*-ratio: 0.4 lets ratios run from e^-0.4 to e^0.4, as in the paper.
    The paper has one advantage a sequence; where they differ inside it, each token is clipped by
    the sign of its own and weighs the same g, so that `aggregation: seq-mean-token-mean`, the
    paper's, gives the mean advantage times g, as in verl.

    Metrics, all `[M]`: `ratio` and `approxkl` of the tokens, `sequence_ratio` (g), `clipfrac` (1
    where the clip changes d), of which `clipfrac_high` (A > 0) and `clipfrac_low` (A < 0).

    Y. Zhao et al., "Geometric-Mean Policy Optimization", arXiv:2507.20673.
    """

    def __init__(self, *, clip_low: float = 0.4, clip_high: float = 0.4) -> None:
        for name, limit in (("clip_low", clip_low), ("clip_high", clip_high)):
            if not limit >= 0.0:
                raise ValueError(f"{name}: expected a log-ratio >= 0, got {limit}")
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        log_ratio = inputs.logprobs - inputs.old_logprobs
        clipped = self._clip(log_ratio, inputs.advantages)
        ratio = clamp_log_ratio(mean_of_sequence(clipped, inputs)).exp()
        loss = -inputs.advantages * ratio
        high = (inputs.advantages > 0) & (log_ratio > self.clip_high)
        low = (inputs.advantages < 0) & (log_ratio < -self.clip_low)
        metrics = {
            **ratio_metrics(clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)),
            "sequence_ratio": ratio.detach(),
            "clipfrac": (high | low).to(loss.dtype),
            "clipfrac_high": high.to(loss.dtype),
            "clipfrac_low": low.to(loss.dtype),
        }
        return PolicyLoss(loss, metrics)

    def _clip(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Keep the pessimistic side: a token gains nothing by moving on the way it is pushed."""
        upper = log_ratio.clamp(max=self.clip_high)
        lower = log_ratio.clamp(min=-self.clip_low)
        return torch.where(advantages > 0, upper, torch.where(advantages < 0, lower, 0.0))
