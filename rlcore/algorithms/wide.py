"""Float64 arithmetic over long float32 vectors, a piece at a time.

A float64 copy of a batch takes twice its memory, and the first touch of new memory costs more than
the sum itself. A piece stays in the cache, and the next piece reuses its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 16  # numbers per piece: 512 KiB in float64


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
