"""PPO with a trust region around another policy than that of the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.losses.ppo_clip import PPOClip
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor


@register_policy_loss(
    "decoupled_ppo",
    needs={"rollout_logprobs"},
    formula="sg(exp(old_logprobs - rollout_logprobs)) * ppo_clip, its ratio to old_logprobs",
    source="Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298",
)
class DecoupledPPO:
    """Clipped surrogate around the proximal policy, weighted from the behaviour policy to it.

        w   = sg(exp(old_logprobs - rollout_logprobs)), the log-ratio clamped to +-20 before exp
        w   = min(w, behavior_cap), or 0 where w > behavior_cap with cap_mode mask
        l_t = w * ppo_clip(r = exp(logprobs - old_logprobs))

    The behaviour policy (`rollout_logprobs`) made the tokens, perhaps several versions ago; the
    proximal one (`old_logprobs`) is the policy at the start of the step, around which the clip
    holds. So it needs `algorithm.old_logprobs: recompute`; with the engine's own log-probs as old
    ones w is 1 and this is `ppo_clip`.

    The papers have no cap. `truncate` bounds the variance and keeps every token; `mask` is what
    AReaL's code does with its `behav_imp_weight_cap`: it drops tokens that the policy has moved
    towards too far. Denominators stay as they are.

    Metrics, all `[M]`: those of `ppo_clip`, `behavior_weight` (after the cap), and
        `behavior_capped` with a cap.

    J. Hilton et al., "Batch size-invariance for policy optimization", arXiv:2110.00641; W. Fu et
    al., "AReaL", arXiv:2505.24298.
    """

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        behavior_cap: float | None = None,
        cap_mode: Literal["truncate", "mask"] = "truncate",
    ) -> None:
        if behavior_cap is not None and not behavior_cap > 0.0:
            raise ValueError(f"behavior_cap: expected a number > 0 or none, got {behavior_cap}")
        self.surrogate = PPOClip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        self.behavior_cap = behavior_cap
        self.cap_mode = cap_mode

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        assert inputs.rollout_logprobs is not None
        surrogate = self.surrogate(inputs)
        uncapped = clamped_log_ratio(inputs.old_logprobs, inputs.rollout_logprobs).detach().exp()
        weight = self._capped(uncapped)
        metrics = {**surrogate.metrics, "behavior_weight": weight}
        if self.behavior_cap is not None:
            metrics["behavior_capped"] = (uncapped > self.behavior_cap).to(weight.dtype)
        return PolicyLoss(weight * surrogate.per_token, metrics)

    def _capped(self, weight: Tensor) -> Tensor:
        if self.behavior_cap is None:
            return weight
        if self.cap_mode == "truncate":
            return weight.clamp(max=self.behavior_cap)
        return torch.where(weight > self.behavior_cap, 0.0, weight)
