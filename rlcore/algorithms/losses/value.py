"""The loss of the critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, clip: float | None = None
) -> Tensor:
    """Return the squared error of the critic at each token, not reduced.

        l_t = 0.5 * (v - R)^2                                              without clip
        l_t = 0.5 * max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2)

    Args:
        values: `[M]`, with grad.
        old_values: `[M]`, the critic before the step; may be None without `clip`.
        returns: `[M]`, the targets.
        clip: half the width of the interval around `old_values`, > 0.

    J. Schulman et al., arXiv:1707.06347, as in OpenAI's baselines.
    """
    plain, clipped = _squared_errors(values, old_values, returns, clip)
    return 0.5 * (plain if clipped is None else torch.maximum(plain, clipped))


def value_clipped(
    values: Tensor, old_values: Tensor | None, returns: Tensor, clip: float | None = None
) -> Tensor:
    """Return 1 where the clip raises the loss, else 0, detached `[M]`: `val/clipfrac_avg`."""
    plain, clipped = _squared_errors(values.detach(), old_values, returns, clip)
    return torch.zeros_like(plain) if clipped is None else (clipped > plain).to(plain.dtype)


def _squared_errors(
    values: Tensor, old_values: Tensor | None, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor | None]:
    for name, other in (("returns", returns), ("old_values", old_values)):
        if other is not None and other.shape != values.shape:
            raise ValueError(
                f"{name}: expected the shape of values, {list(values.shape)}, got"
                f" {list(other.shape)}"
            )
    plain = (values - returns).square()
    if clip is None:
        return plain, None
    if not clip > 0:
        raise ValueError(f"clip: expected a number > 0 or none, got {clip}")
    if old_values is None:
        raise ValueError("old_values: expected a tensor [M] with clip, got None")
    return plain, (values.clamp(old_values - clip, old_values + clip) - returns).square()
