"""The discounted suffix sum of ragged vectors, without a step in Python per token or per sequence.

The flat vector is read as rows of 32 tokens, whatever the sequences in it. A piece is what one
sequence owns of one row.

1. Inside a row: first within every 4 tokens, one by one; then neighbours of 4, 8, … tokens are
   joined, the right one's first entry times powers of the decay added to the left one. Nothing ever
   moves to the right, so what a row ends with is right, whatever precedes it.
2. The pieces at which sequences end are at most one a sequence. They are cut out first, scanned
   apart as rows that end with their sequence, and put back over what came out wrong.
3. The first entries of the rows are a ragged vector 32 times shorter, scanned with `decay ** 32` by
   doubling: windows of 1, 2, 4, … entries add up. Its result is what each row receives from the row
   behind it.

All of it is float64 and touches M numbers a few times, in place.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


_ROW = 32  # tokens per row; longer rows save little, and cost more where sequences end


def discounted_suffix_sum(x: Tensor, cu_seqlens: Tensor, decay: float | Tensor) -> Tensor:
    """Compute `y_t = x_t + decay * y_{t+1}` inside each sequence, with `y = 0` behind it.

    Args:
        x: float `[M]`.
        cu_seqlens: integer `[B+1]`.
        decay: between 0 and 1; a number, or a float tensor `[B]` with one decay a sequence (a
            constant to autograd).

    Returns:
        `[M]`, dtype of `x`, a new tensor. The work is done in float64: no sum over a sequence is
            rounded before its end.
    """
    if not x.is_floating_point():
        raise ValueError(f"x: expected a floating dtype, got {x.dtype}")
    result: Tensor = _suffix_sum().apply(x, cu_seqlens.long(), _checked_decay(decay, cu_seqlens))
    return result


def discounted_suffix_sum_(x: Tensor, cu_seqlens: Tensor, decay: float | Tensor) -> Tensor:
    """Compute `discounted_suffix_sum` in place, on a contiguous float64 `[M]` without gradient."""
    if x.dtype != torch.float64 or not x.is_contiguous() or x.requires_grad:
        raise ValueError(
            f"x: expected a contiguous float64 tensor without gradient, got {x.dtype}, strides"
            f" {x.stride()}, requires_grad {x.requires_grad}; call discounted_suffix_sum"
        )
    return _scan_(x, cu_seqlens.long(), _checked_decay(decay, cu_seqlens))


def _checked_decay(decay: float | Tensor, cu_seqlens: Tensor) -> float | Tensor:
    """Return `decay` as a float, or as float64 `[B]` on the device of `cu_seqlens`."""
    if not isinstance(decay, torch.Tensor):
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay: expected a number in [0, 1], got {decay}")
        return float(decay)
    sequences = cu_seqlens.numel() - 1
    if tuple(decay.shape) != (sequences,) or not decay.is_floating_point():
        raise ValueError(
            f"decay: expected a float tensor [B] = [{sequences}], one decay a sequence, got"
            f" {decay.dtype} {list(decay.shape)}"
        )
    outside = (~((decay >= 0) & (decay <= 1))).nonzero()
    if outside.numel():
        first = int(outside[0])
        raise ValueError(
            f"decay: expected numbers in [0, 1], got {float(decay[first])} for sequence {first}"
        )
    return decay.detach().double().to(cu_seqlens.device)


@cache
def _suffix_sum() -> type[torch.autograd.Function]:
    """Return the differentiable scan; made at its first use, so that importing needs no torch.

    The gradient of a suffix sum is the prefix sum: a suffix sum of the reversed entries.
    """

    class SuffixSum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor, decay: float | Tensor) -> Tensor:
            ctx.cu_seqlens = cu_seqlens
            ctx.decay = decay
            return _scan_(x.to(torch.float64, copy=True), cu_seqlens, decay).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            decay = ctx.decay.flip(0) if isinstance(ctx.decay, torch.Tensor) else ctx.decay
            offsets = ctx.cu_seqlens[-1] - ctx.cu_seqlens.flip(0)
            return SuffixSum.apply(grad.flip(0), offsets, decay).flip(0), None, None

    return SuffixSum


def _scan_(y: Tensor, cu_seqlens: Tensor, decay: float | Tensor) -> Tensor:
    """`discounted_suffix_sum_` of checked arguments: int64 `cu_seqlens`, `decay` float or `[B]`."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest <= 1 or (isinstance(decay, float) and decay == 0.0):
        return y
    if longest <= _ROW:
        return _scan_by_doubling(y, cu_seqlens, decay, longest)
    if isinstance(decay, torch.Tensor):
        decay = decay[lengths > 0]
    return _scan_by_rows(y, cu_seqlens.unique_consecutive(), decay, longest)


def _scan_by_rows(y: Tensor, offsets: Tensor, decay: float | Tensor, longest: int) -> Tensor:
    """Scan non-empty sequences in rows; the last row has only pieces that end sequences."""
    num_rows = y.numel() // _ROW
    rows = y[: num_rows * _ROW].view(num_rows, _ROW)
    ends = offsets[1:]
    piece_lengths = torch.minimum(offsets.diff(), (ends - 1) % _ROW + 1)
    # [sequences, 32]: the piece with which each sequence ends, aligned to the right; to the left of
    # it its first token
    column = torch.maximum(torch.arange(_ROW, device=y.device), (_ROW - piece_lengths)[:, None])
    token = column + (ends - _ROW)[:, None]
    ending = y[token]

    sequence_powers = _powers(decay, y.device)
    row_powers = sequence_powers
    if isinstance(decay, torch.Tensor):
        # A row has the decay of the sequence that continues after it.
        row_powers = sequence_powers.repeat_interleave((offsets // _ROW).diff(), dim=0)
    _scan_inside(rows, row_powers)
    _scan_inside(ending, sequence_powers)
    ending = ending.gather(1, column)
    y[token] = ending

    firsts = _scan_by_doubling(
        y[::_ROW].clone(), (offsets + _ROW - 1) // _ROW, decay**_ROW, -(-longest // _ROW) + 1
    )
    carried = firsts[1:, None]
    rows[: len(carried)].addcmul_(
        carried, row_powers if isinstance(decay, float) else row_powers[: len(carried)]
    )
    # Restore the ends of sequences, which must receive nothing from the next row.
    y[token] = ending
    return y


def _powers(decay: float | Tensor, device: torch.device) -> Tensor:
    """`decay ** 32, …, decay ** 1`, float64 `[1 or B, 32]`: what reaches each token of a row."""
    distance = torch.arange(_ROW, 0, -1, dtype=torch.float64, device=device)
    base = decay[:, None] if isinstance(decay, torch.Tensor) else decay
    return base ** distance.expand(1, _ROW)


def _scan_inside(rows: Tensor, powers: Tensor) -> None:
    """Suffix sums of each row `[n, 32]`, in place."""
    of_four = rows.view(rows.shape[0], -1, 4).unbind(2)
    decay = powers[:, -1:]
    # Token by token, since kernels over 1 or 2 numbers are slow.
    for t in (2, 1, 0):
        of_four[t].addcmul_(of_four[t + 1], decay)
    for width in (4, 8, 16):
        left, right = rows.view(rows.shape[0], -1, 2, width).unbind(2)
        left.addcmul_(right[..., :1], powers[:, None, -width:])


def _scan_by_doubling(y: Tensor, cu_seqlens: Tensor, decay: float | Tensor, longest: int) -> Tensor:
    """Suffix sums in place; `longest` is at least the length of the longest sequence."""
    lengths = cu_seqlens.diff()
    entry = torch.arange(y.numel(), device=y.device)
    behind = torch.repeat_interleave(cu_seqlens[1:] - 1, lengths, output_size=y.numel()) - entry
    zero = y.new_zeros(())
    rate = decay
    if isinstance(decay, torch.Tensor):
        rate = torch.repeat_interleave(decay, lengths, output_size=y.numel())
    width = 1
    while width < longest:
        # where, not a product with a mask: 0 * inf of the next sequence would be NaN
        window = torch.where(behind[:-width] >= width, y[width:], zero)
        if isinstance(rate, torch.Tensor):
            y[:-width].addcmul_(window, rate[:-width])
        else:
            y[:-width].add_(window, alpha=rate)
        rate = rate * rate
        width *= 2
    return y
