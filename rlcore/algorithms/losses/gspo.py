"""Group Sequence Policy Optimization: one ratio a sequence, clipped as a whole or by token."""

from __future__ import annotations

from rlcore.algorithms.kl import clamp_log_ratio, clamped_log_ratio
from rlcore.algorithms.losses.surrogate import (
    check_clip,
    clipped_surrogate,
    mean_of_sequence,
    ratio_metrics,
)
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs


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
