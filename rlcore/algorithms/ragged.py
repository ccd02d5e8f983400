"""Operations on ragged vectors: a flat `[M]` tensor cut into B sequences by `cu_seqlens` (`[B+1]`).

Sequence b owns the tokens `cu_seqlens[b] : cu_seqlens[b + 1]`; it may own none. There are no pads
and no masks, so nothing can leak out of a sequence. Everything here is pure, works on any device
and is differentiable in its values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.algorithms.wide import mean_and_variance, pieces


def segment_lengths(cu_seqlens: Tensor) -> Tensor:
    """Return the number of tokens of each sequence, int64 `[B]`."""
    return cu_seqlens.diff().long()


def segment_index(cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Return the sequence of each token, int64 `[M]`; a given M saves a wait for the device."""
    num_tokens = int(cu_seqlens[-1]) if num_tokens is None else num_tokens
    return torch.repeat_interleave(segment_lengths(cu_seqlens), output_size=num_tokens)


def last_token_index(cu_seqlens: Tensor) -> Tensor:
    """Return the position of the last token of each non-empty sequence, int64."""
    return cu_seqlens[1:][segment_lengths(cu_seqlens) > 0].long() - 1


def expand_to_tokens(
    per_sequence: Tensor, cu_seqlens: Tensor, num_tokens: int | None = None
) -> Tensor:
    """Repeat a value of each sequence on each of its tokens: `[B]` to `[M]`."""
    return per_sequence[segment_index(cu_seqlens, num_tokens)]


def segment_sum(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum `x` (`[M]`) over each sequence in float64: `[B]`; an empty sequence sums to 0."""
    lengths = segment_lengths(cu_seqlens)
    if lengths.numel() == 0 or x.numel() == 0:
        return x.new_zeros(lengths.numel()) + x.sum()  # the sum keeps the result in the graph
    # unsafe leaves out a check of lengths that would make the host wait for the device
    return torch.segment_reduce(
        x.double(), "sum", lengths=lengths, initial=0.0, unsafe=x.is_cuda
    ).to(x.dtype)


def segment_mean(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Average `x` (`[M]`) over each sequence: `[B]`; the mean of an empty sequence is 0."""
    return segment_sum(x, cu_seqlens) / segment_lengths(cu_seqlens).clamp(min=1)


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


def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Number the groups of `group_ids` (any integers) from 0: int64 `[B]`, and their count."""
    unique, inverse = torch.unique_consecutive(group_ids, return_inverse=True)
    if not bool((unique[1:] > unique[:-1]).all()):  # batches mostly come in order: no sort then
        unique, inverse = torch.unique(group_ids, return_inverse=True)
    return inverse, unique.numel()


def group_count(group_ids: Tensor) -> Tensor:
    """Return the size of the group of each member, int64 `[B]`."""
    inverse, num_groups = group_index(group_ids)
    return torch.bincount(inverse, minlength=num_groups)[inverse]


def group_mean_std(x: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased standard deviation of the group of each member, both `[B]` float64.

    A group of one has std 0. Values are first shifted by the minimum of their group and the
    variance is two-pass, so a group of equal values has exactly that mean and exactly std 0,
    whatever the value.
    """
    inverse, num_groups = group_index(group_ids)
    wide = x.double()
    count = torch.bincount(inverse, minlength=num_groups)
    origin = wide.new_full((num_groups,), float("inf")).scatter_reduce(
        0, inverse, wide.detach(), "amin"
    )
    shifted = wide - origin[inverse]
    mean = wide.new_zeros(num_groups).index_add(0, inverse, shifted) / count
    squares = wide.new_zeros(num_groups).index_add(0, inverse, (shifted - mean[inverse]).square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return (origin + mean)[inverse], std[inverse]
