"""Operations on ragged vectors: a flat `[M]` tensor cut into B sequences by `cu_seqlens` (`[B+1]`).

Sequence b owns the tokens `cu_seqlens[b] : cu_seqlens[b + 1]`; it may own none. There are no pads
and no masks, so nothing can leak out of a sequence. Everything here but `add_` is pure; all of it
works on any device and is differentiable in its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

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
