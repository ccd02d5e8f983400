"""The clipped policy loss of PPO, with separate limits and dual clip."""

from __future__ import annotations

import torch

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs


@register_policy_loss("ppo_clip")
class PPOClip:
    """Token-level clipped surrogate.

        r   = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 before exp
        l_t = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        l_t = min(l_t, -dual_clip * A)                                where A < 0 and dual_clip is given

    The gradient is finite everywhere, and 0 where the log-ratio is beyond its limits. Metrics, all `[M]`: `ratio`,
    `approxkl` (half the squared log-ratio), `clipfrac` (1 where the clip changes the loss), of which `clipfrac_high`
    (A > 0) and `clipfrac_low` (A < 0), and `dual_clipfrac` with dual clip.

    J. Schulman et al., arXiv:1707.06347; dual clip: D. Ye et al., arXiv:1912.09729; clip-higher: DAPO,
    arXiv:2503.14476.
    """

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> None:
        if not 0.0 <= clip_low <= 1.0:
            raise ValueError(f"clip_low: expected a number in [0, 1], got {clip_low}")
        if not clip_high >= 0.0:
            raise ValueError(f"clip_high: expected a number >= 0, got {clip_high}")
        if dual_clip is not None and not dual_clip > 1.0:
            raise ValueError(f"dual_clip: expected a number > 1 or none, got {dual_clip}")
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        advantages = inputs.advantages
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        ratio = log_ratio.exp()
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss = torch.maximum(plain, clipped)
        acts = clipped.detach() > plain.detach()
        metrics = {
            "ratio": ratio.detach(),
            "approxkl": 0.5 * log_ratio.detach().square(),
            "clipfrac": acts.to(loss.dtype),
            "clipfrac_high": (acts & (advantages > 0)).to(loss.dtype),
            "clipfrac_low": (acts & (advantages < 0)).to(loss.dtype),
        }
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            capped = (advantages < 0) & (loss.detach() > bound)
            loss = torch.where(capped, bound, loss)
            metrics["dual_clipfrac"] = capped.to(loss.dtype)
        return PolicyLoss(loss, metrics)
