"""Tokens that are too old to be trained on, by the policy version that made them."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.algorithms.errors import InputError


def stale_tokens(versions: Tensor, current_version: int, max_staleness: int) -> Tensor:
    """Return where `current_version - versions > max_staleness`, bool `[M]`.

    Args:
        versions: integer `[M]`, the policy version that made each token; tokens of one sequence may
            differ.
        current_version: the version that is about to be trained, from which they are counted.
        max_staleness: a token may be this many versions old, >= 0.

    Raises:
        InputError: a token is newer than the policy: versions only ever grow, so one of the two is
            wrong.
        ValueError: `max_staleness` is negative.
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness: expected a number of versions >= 0, got {max_staleness}")
    if versions.is_floating_point() or versions.dtype == torch.bool:
        raise InputError(f"versions: expected an integer dtype, got {versions.dtype}")
    age = current_version - versions
    if age.numel() and int(age.min()) < 0:
        raise InputError(
            f"versions: expected none above the current version {current_version}, got"
            f" {int(versions.max())}"
        )
    return age > max_staleness


def mask_weights(weights: Tensor, dropped: Tensor) -> Tensor:
    """Return `weights` (`[M]`) with 0 where `dropped`: those tokens lose every term of the loss.

    Call it after `loss_weights`: the other tokens keep their weight, since a denominator that
    shrank with the dropped tokens would make each that is left count for more the more are dropped.
    """
    if weights.shape != dropped.shape or dropped.dtype != torch.bool:
        raise InputError(
            f"dropped: expected bool of shape {list(weights.shape)}, got {dropped.dtype}"
            f" {list(dropped.shape)}"
        )
    return weights.masked_fill(dropped, 0.0)
