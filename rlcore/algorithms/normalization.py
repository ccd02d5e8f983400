"""Normalisation of advantages: whitening over a batch or over each group of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from rlcore.algorithms.errors import known_names
from rlcore.algorithms.ragged import (
    expand_to_tokens,
    group_index,
    mean_and_variance,
    pieces,
    segment_lengths,
    segment_sum,
)

if TYPE_CHECKING:
    from torch import Tensor

NormalizationMode = Literal["batch", "group", "none"]
_EPS = 1e-8


def whiten(x: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Scale `x` to unit variance: `(x - mean) * rsqrt(var + eps)`.

    `shift_mean=False` adds the mean again.

    The variance is unbiased and two-pass, in float64: `E[x^2] - mean^2` in fp32 is noise for mean
    50 and std 1e-3. An empty tensor stays empty; a single value, whose variance is taken as 0,
    becomes 0 (or stays as it is).
    """
    if not x.is_floating_point():
        raise ValueError(f"x: expected a floating dtype, got {x.dtype}")
    if x.numel() == 0:
        return x.clone()
    mean, variance = mean_and_variance(x)
    scale = torch.rsqrt(variance + eps)

    def whitened(part: Tensor) -> Tensor:
        centred = (part.double() - mean) * scale
        return (centred if shift_mean else centred + mean).to(x.dtype)

    return torch.cat([whitened(part) for (part,) in pieces(x)])


def normalize_advantages(
    advantages: Tensor, cu_seqlens: Tensor, group_ids: Tensor, mode: NormalizationMode
) -> Tensor:
    """Whiten advantages over all tokens of the batch, or over the tokens of each group.

        batch   (A - mean) * rsqrt(var + 1e-8)        `whiten`: over all M tokens
        group   the same, mean and var over the tokens of all sequences of a group
        none    A, as it is

    The variance is unbiased and two-pass, in float64. A group (or batch) with one token becomes 0.

    Args:
        advantages: float `[M]`.
        cu_seqlens: integer `[B+1]`.
        group_ids: integer `[B]`; read by mode "group" alone.

    Returns:
        `[M]`, dtype of `advantages`; with "none" the very tensor.
    """
    modes = get_args(NormalizationMode)
    if mode not in modes:
        raise ValueError(f"mode: unknown normalization {mode!r}; {known_names(str(mode), modes)}")
    if mode == "none":
        return advantages
    if mode == "batch":
        return whiten(advantages)
    lengths = segment_lengths(cu_seqlens)
    if tuple(group_ids.shape) != tuple(lengths.shape):
        raise ValueError(
            f"group_ids: expected shape [B] = {list(lengths.shape)}, got {list(group_ids.shape)}"
        )
    return _whiten_groups(advantages.double(), cu_seqlens, group_ids).to(advantages.dtype)


def _whiten_groups(x: Tensor, cu_seqlens: Tensor, group_ids: Tensor) -> Tensor:
    """`whiten` the tokens of each group, float64 `[M]`: sums over sequences, then over groups."""
    index, num_groups = group_index(group_ids)

    def group_total(per_sequence: Tensor) -> Tensor:
        return per_sequence.new_zeros(num_groups).index_add(0, index, per_sequence)

    def per_token(per_group: Tensor) -> Tensor:
        return expand_to_tokens(per_group[index], cu_seqlens, x.numel())

    count = group_total(segment_lengths(cu_seqlens))
    mean = group_total(segment_sum(x, cu_seqlens)) / count.clamp(min=1)
    centred = x - per_token(mean)
    variance = group_total(segment_sum(centred.square(), cu_seqlens)) / (count - 1).clamp(min=1)
    return centred.mul_(per_token(torch.rsqrt(variance + _EPS)))
