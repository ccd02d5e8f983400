"""The clipped policy loss of PPO, with separate limits and dual clip."""

from __future__ import annotations

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.losses.surrogate import check_clip, clipped_surrogate, ratio_metrics
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs


@register_policy_loss(
    "ppo_clip",
    formula=(
        "max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 at most -dual_clip * A"
    ),
    source=(
        "Schulman et al., arXiv:1707.06347; dual clip: Ye et al., arXiv:1912.09729; clip-higher:"
        " arXiv:2503.14476"
    ),
)
class PPOClip:
    """Token-level clipped surrogate.

        r   = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 before exp
        l_t = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        l_t = min(l_t, -dual_clip * A)              where A < 0 and dual_clip is given

    The gradient is finite everywhere, and 0 where the log-ratio is beyond its limits. Metrics, all
    `[M]`: `ratio`, `approxkl` (half the squared log-ratio), `clipfrac` (1 where the clip changes
    the loss), of which `clipfrac_high` (A > 0) and `clipfrac_low` (A < 0), and `dual_clipfrac` with
    dual clip.

    J. Schulman et al., arXiv:1707.06347; dual clip: D. Ye et al., arXiv:1912.09729; clip-higher:
    DAPO, arXiv:2503.14476.
    """

    def __init__(
        self, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
    ) -> None:
        check_clip(clip_low, clip_high, dual_clip)
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        loss, clips = clipped_surrogate(
            log_ratio.exp(), inputs.advantages, self.clip_low, self.clip_high, self.dual_clip
        )
        return PolicyLoss(loss, {**ratio_metrics(log_ratio), **clips})
