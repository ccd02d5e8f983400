"""Group Sequence Policy Optimization: one ratio a sequence, clipped as a whole."""

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
