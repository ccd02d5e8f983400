"""The clipped surrogate, its limits, and the metrics of a ratio, for the losses on a ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.ragged import expand_to_tokens, segment_mean
from rlcore.algorithms.types import PolicyLossInputs

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
