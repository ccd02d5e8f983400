"""The losses on the ratio of a token, and what losses on a ratio share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.ragged import expand_to_tokens, segment_mean
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Refuse limits that would exclude a ratio of 1, or a dual clip that would act on one."""
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low: expected a number in [0, 1], got {clip_low}")
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high: expected a number >= 0, got {clip_high}")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip: expected a number > 1 or none, got {dual_clip}")


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss of a ratio, `[M]`, and where the clip changed it.

        l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        l = min(l, -dual_clip * A)                            where A < 0 and dual_clip is given

    Metrics, `[M]`: `clipfrac`, of which `clipfrac_high` (A > 0) and `clipfrac_low` (A < 0), and
    `dual_clipfrac` with dual clip.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    acts = clipped.detach() > plain.detach()
    metrics = {
        "clipfrac": acts.to(loss.dtype),
        "clipfrac_high": (acts & (advantages > 0)).to(loss.dtype),
        "clipfrac_low": (acts & (advantages < 0)).to(loss.dtype),
    }
    if dual_clip is not None:
        bound = -dual_clip * advantages
        capped = (advantages < 0) & (loss.detach() > bound)
        loss = torch.where(capped, bound, loss)
        metrics["dual_clipfrac"] = capped.to(loss.dtype)
    return loss, metrics


def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Return `ratio` and `approxkl` (half the squared log-ratio) of a clamped log-ratio, `[M]`.

    Every loss reports these of the tokens, also one that works with the ratio of a sequence.
    """
    log_ratio = log_ratio.detach()
    return {"ratio": log_ratio.exp(), "approxkl": 0.5 * log_ratio.square()}


def mean_of_sequence(x: Tensor, inputs: PolicyLossInputs) -> Tensor:
    """Return on each token the mean of `x` over its sequence, `[M]`."""
    return expand_to_tokens(
        segment_mean(x, inputs.cu_seqlens), inputs.cu_seqlens, inputs.num_tokens
    )


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
        weight = uncapped
        metrics = {**surrogate.metrics}
        if self.behavior_cap is not None:
            above = uncapped > self.behavior_cap
            weight = uncapped.clamp(max=self.behavior_cap)
            if self.cap_mode == "mask":
                weight = torch.where(above, 0.0, uncapped)
            metrics["behavior_capped"] = above.to(weight.dtype)
        metrics["behavior_weight"] = weight
        return PolicyLoss(weight * surrogate.per_token, metrics)


@register_policy_loss(
    "sapo",
    formula="-A * (4 / tau) * sigmoid(tau * (r - 1)),  tau = tau_pos where A > 0, else tau_neg",
    source="Gao et al., arXiv:2511.20347",
)
class SAPO:
    """Surrogate whose slope fades as the ratio leaves 1, faster for negative advantages.

        r   = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 before exp
        tau = tau_pos where A > 0, else tau_neg
        l_t = -A * (4 / tau) * sigmoid(tau * (r - 1))

    The factor 4 / tau gives slope 1 at r = 1, where the gradient is that of -A r. Its value there
    is -2 A / tau, so losses of different tau do not compare. The paper averages over each sequence:
    `aggregation: seq-mean-token-mean`. Metrics, `[M]`: `ratio` and `approxkl`; nothing is clipped.

    C. Gao et al., "Soft Adaptive Policy Optimization", arXiv:2511.20347.
    """

    def __init__(self, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> None:
        for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
            if not 0.0 < tau < float("inf"):
                raise ValueError(f"{name}: expected a number > 0, got {tau}")
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        tau = torch.full_like(log_ratio, self.tau_neg).masked_fill(
            inputs.advantages > 0, self.tau_pos
        )
        gate = (4.0 / tau) * torch.sigmoid(tau * torch.expm1(log_ratio))
        return PolicyLoss(-inputs.advantages * gate, ratio_metrics(log_ratio))
