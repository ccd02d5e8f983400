"""Operations on ragged vectors: a flat `[M]` tensor cut into B sequences by `cu_seqlens` (`[B+1]`).

Sequence b owns the tokens `cu_seqlens[b] : cu_seqlens[b + 1]`; it may own none. There are no pads
and no masks, so nothing can leak out of a sequence. Everything here but `add_` is pure; all of it
works on any device and is differentiable in its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, get_args

import torch

from rlcore.algorithms.errors import known_names

if TYPE_CHECKING:
    from torch import Tensor


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_gradient(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate like `torch.no_grad()`, but without using torch before the first call."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


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
        # The sum keeps the result in the graph.
        return x.new_zeros(lengths.numel()) + x.sum()
    # `unsafe` skips a check of lengths that would make the host wait for the device.
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
    # Most batches are in order and need no sort.
    if not bool((unique[1:] > unique[:-1]).all()):
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


# --- normalisation of advantages ------------------------------------------------------------------


NormalizationMode = Literal["batch", "group", "none"]

_EPS = 1e-8


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


# --- float64 arithmetic over long float32 vectors -------------------------------------------------

# A float64 copy of a batch takes twice its memory, and the first touch of new memory costs more
# than the sum itself. A piece (512 KiB) stays in the cache, and the next piece reuses its memory.
PIECE = 1 << 16


def pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same tokens of each `[M]` vector, in order; one empty piece if M is 0."""
    return zip(*(vector.split(PIECE) for vector in vectors), strict=True)


def add_(wide: Tensor, x: Tensor, alpha: float = 1.0) -> Tensor:
    """Add `alpha * x` (any float `[M]`) to `wide` (float64 `[M]`) in place, and return it."""
    if wide.numel() <= PIECE:
        return wide.add_(x, alpha=alpha)
    for into, part in pieces(wide, x):
        into.add_(part, alpha=alpha)
    return wide


def mean_and_variance(x: Tensor, minus: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of `x`, or of `x - minus`, as float64 scalars; M > 0.

    Two passes: `E[x^2] - mean^2` is noise where the mean is far above the deviation. The variance
    of one number is 0.
    """
    vectors = (x,) if minus is None else (x, minus)
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    mean = sum((_difference(*part).sum() for part in pieces(*vectors)), zero) / x.numel()
    squares = sum(((_difference(*part) - mean).square().sum() for part in pieces(*vectors)), zero)
    return mean, squares / max(x.numel() - 1, 1)


def _difference(x: Tensor, minus: Tensor | None = None) -> Tensor:
    return x.double() if minus is None else x.double() - minus
