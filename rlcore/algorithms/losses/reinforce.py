"""The losses on the log-prob itself: REINFORCE, CISPO, and supervised fine-tuning."""

from __future__ import annotations

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.losses.surrogate import check_clip, ratio_metrics
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs


@register_policy_loss(
    "reinforce",
    formula="-A * logprobs",
    source="Williams, Machine Learning 8, 1992; for GRPO: GPG, arXiv:2504.02546",
)
class Reinforce:
    """Log-likelihood weighted by the advantage, with no ratio and no clip.

        l_t = -A * logprobs

    Correct for tokens of the policy being trained; `old_logprobs` go into the metrics only (`ratio`
    and `approxkl`, `[M]`), which measure the distance from that case. verl calls this loss `gpg`.

    R. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning", Machine Learning 8, 1992; X. Chu et al., "GPG", arXiv:2504.02546.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        log_ratio = clamped_log_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
        return PolicyLoss(-inputs.advantages * inputs.logprobs, ratio_metrics(log_ratio))


@register_policy_loss(
    "cispo",
    formula="-sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprobs",
    source="MiniMax-M1, arXiv:2506.13585",
)
class CISPO:
    """REINFORCE with a clipped importance weight, so that no token loses its gradient to the clip.

        r   = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 before exp
        l_t = -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprobs        sg: no gradient

    The paper has no lower limit and does not print its upper one. `clip_low: 1` is no lower limit,
    `clip_high: 4` caps the weight at 5, as TRL recommends after ScaleRL (arXiv:2510.13786). verl
    takes PPO's own limits.

    Metrics, all `[M]`: `ratio`, `approxkl`, `clipfrac` (1 where the clip changes the weight and A
    is not 0), of which `clipfrac_high` (upper limit) and `clipfrac_low` (lower limit), whatever the
    sign of A.

    MiniMax, "MiniMax-M1", arXiv:2506.13585, equations 4 and 5.
    """

    def __init__(self, *, clip_low: float = 1.0, clip_high: float = 4.0) -> None:
        check_clip(clip_low, clip_high)
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        log_ratio = clamped_log_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
        metrics = ratio_metrics(log_ratio)
        ratio = metrics["ratio"]
        weight = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss = -weight * inputs.advantages * inputs.logprobs
        credited = inputs.advantages != 0
        metrics["clipfrac"] = ((ratio != weight) & credited).to(loss.dtype)
        metrics["clipfrac_high"] = ((ratio > weight) & credited).to(loss.dtype)
        metrics["clipfrac_low"] = ((ratio < weight) & credited).to(loss.dtype)
        return PolicyLoss(loss, metrics)


@register_policy_loss("sft", formula="-logprobs", source="maximum likelihood")
class SFT:
    """Negative log-likelihood of each trainable token, `l_t = -logprobs_t`; advantages and old
    log-probs are unread.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        return PolicyLoss(-inputs.logprobs)
