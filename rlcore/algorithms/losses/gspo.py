"""The losses on the mean ratio of a sequence: GSPO and geometric-mean policy optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.kl import clamp_log_ratio, clamped_log_ratio
from rlcore.algorithms.losses.surrogate import (
    check_clip,
    clipped_surrogate,
    mean_of_sequence,
    ratio_metrics,
)
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor


@register_policy_loss(
    "gspo",
    formula=(
        "max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)),  s = exp(mean over the sequence of"
        " log r)"
    ),
    source="Zheng et al., arXiv:2507.18071",
)
class GSPO:
    """Clipped surrogate of the length-normalised ratio of the sequence.

        s   = exp(mean over the sequence of (logprobs - old_logprobs)), clamped to +-20 before exp
        l_t = max(-A_t s, -A_t clip(s, 1 - clip_low, 1 + clip_high))

    Each token's loss has a gradient to every token of its sequence. Under `aggregation:
    seq-mean-token-mean` and one advantage a sequence this is the paper's objective; advantages that
    differ inside a sequence each weigh the same s. The default limits are the paper's: s lies far
    closer to 1 than a token's ratio. The clamp is on the mean, which is what goes into exp; single
    tokens may lie beyond it.

    Metrics, all `[M]`: `ratio` and `approxkl` of the tokens, `sequence_ratio` (s), and the clip
    fractions of `ppo_clip`.

    C. Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071.
    """

    def __init__(self, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> None:
        check_clip(clip_low, clip_high)
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        ratio = clamp_log_ratio(
            mean_of_sequence(inputs.logprobs - inputs.old_logprobs, inputs)
        ).exp()
        loss, clips = clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        metrics = ratio_metrics(clamped_log_ratio(inputs.logprobs, inputs.old_logprobs))
        return PolicyLoss(loss, {**metrics, "sequence_ratio": ratio.detach(), **clips})


@register_policy_loss(
    "gspo_token",
    formula=(
        "max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)),  s_t = sg(s) * r_t / sg(r_t), s as"
        " in gspo"
    ),
    source="Zheng et al., arXiv:2507.18071, section 4.3",
)
class GSPOToken(GSPO):
    """GSPO with a gradient for each token of its own, for advantages that differ inside a sequence.

        s   = exp(mean over the sequence of (logprobs - old_logprobs)), the exponent clamped to +-20
        s_t = sg(s) * exp(logprobs_t - sg(logprobs_t))                     sg: no gradient
        l_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high))

    Values and metrics are those of `gspo`. So is the gradient, where advantages and loss weights
    are equal inside each sequence; else `gspo` spreads every token's push over its whole sequence
    and this loss does not. verl's `gspo` is this variant. A token whose own log-ratio is beyond
    +-20 has no gradient.

    C. Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071, section 4.3.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        mean = mean_of_sequence((inputs.logprobs - inputs.old_logprobs).detach(), inputs)
        ratio = clamp_log_ratio(mean + (log_ratio - log_ratio.detach())).exp()
        loss, clips = clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        return PolicyLoss(
            loss, {**ratio_metrics(log_ratio), "sequence_ratio": ratio.detach(), **clips}
        )


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
