"""The discounted suffix sum of ragged vectors, without a step in Python per token or per sequence.

The flat vector is read as rows of 32 tokens, whatever the sequences in it. A piece is what one sequence owns of one row.

1. Inside a row: neighbours of 1, 2, 4, … tokens are joined in place, the right one's first entry times powers of the
   decay added to the left one. Nothing ever moves to the right, so what a row ends with is right, whatever precedes it.
2. The pieces at which sequences end are at most one a sequence. They are cut out first, scanned apart as rows that end with
   their sequence, and put back over what came out wrong.
3. The first entries of the rows are a ragged vector 32 times shorter, scanned with `decay ** 32` by doubling: windows of
   1, 2, 4, … entries add up. Its result is what each row receives from the row behind it.

All of it is float64 and touches M numbers a few times, in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROW = 32  # tokens; longer rows save little, and cost more where sequences end


def suffix_scan(x: Tensor, cu_seqlens: Tensor, decay: float | Tensor) -> Tensor:
    """`discounted_suffix_sum` of checked arguments: int64 `cu_seqlens`; `decay` a float, or float64 `[B]`."""
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _SuffixScan.apply(x, cu_seqlens, decay)
        return result
    return _scan(x, cu_seqlens, decay)


class _SuffixScan(torch.autograd.Function):
    """The gradient of a suffix sum is the prefix sum: the suffix sum of everything turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor, decay: float | Tensor) -> Tensor:
        ctx.cu_seqlens, ctx.decay = cu_seqlens, decay
        return _scan(x, cu_seqlens, decay)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        decay = ctx.decay.flip(0) if isinstance(ctx.decay, Tensor) else ctx.decay
        borders = ctx.cu_seqlens[-1] - ctx.cu_seqlens.flip(0)
        return suffix_scan(grad.flip(0), borders, decay).flip(0), None, None


def _scan(x: Tensor, cu_seqlens: Tensor, decay: float | Tensor) -> Tensor:
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest <= 1 or (isinstance(decay, float) and decay == 0.0):
        return x.clone()
    if longest <= _ROW:
        return _scan_by_doubling(x.to(torch.float64, copy=True), cu_seqlens, decay, longest).to(x.dtype)
    if isinstance(decay, Tensor):
        decay = decay[lengths > 0]
    return _scan_by_rows(x, cu_seqlens.unique_consecutive(), decay, longest)


def _scan_by_rows(x: Tensor, borders: Tensor, decay: float | Tensor, longest: int) -> Tensor:
    """The scan of sequences none of which is empty."""
    num_rows = -(-x.numel() // _ROW)
    # one number more than the rows hold: it stands for the tokens that a piece does not have
    y = torch.empty(num_rows * _ROW + 1, dtype=torch.float64, device=x.device)
    y[: x.numel()] = x
    y[x.numel() :] = 0.0
    rows = y[:-1].view(num_rows, _ROW)

    starts, ends = borders[:-1], borders[1:]
    token = ends[:, None] + torch.arange(-_ROW, 0, device=x.device)
    piece_starts = torch.maximum(starts, (ends - 1) // _ROW * _ROW)
    token = torch.where(token >= piece_starts[:, None], token, num_rows * _ROW)
    ending = y[token]  # [sequences, 32]: the tokens of each sequence in the row where it ends, aligned to the right

    sequence_powers = _powers(decay, x.device)
    row_powers = sequence_powers
    if isinstance(decay, Tensor):  # a row decays as the sequence does that goes on behind it
        row_powers = sequence_powers.repeat_interleave((borders // _ROW).diff(), dim=0)
        row_powers = torch.cat([row_powers, sequence_powers[-1:]])[:num_rows]
    _scan_inside(rows, row_powers)
    _scan_inside(ending, sequence_powers)
    y[token] = ending

    row_borders = (borders + _ROW - 1) // _ROW
    firsts = _scan_by_doubling(rows[:, 0].clone(), row_borders, decay**_ROW, -(-longest // _ROW) + 1)
    rows[:-1].addcmul_(firsts[1:, None], row_powers if row_powers.shape[0] == 1 else row_powers[:-1])
    y[token] = ending  # nothing follows where a sequence ends
    return y[: x.numel()].to(x.dtype, copy=True)


def _powers(decay: float | Tensor, device: torch.device) -> Tensor:
    """`decay ** 32, …, decay ** 1`, float64 `[1 or B, 32]`: what reaches each token of a row from behind it."""
    base = decay if isinstance(decay, Tensor) else torch.tensor([decay], dtype=torch.float64, device=device)
    return base[:, None] ** torch.arange(_ROW, 0, -1, device=device)


def _scan_inside(rows: Tensor, powers: Tensor) -> None:
    """Suffix sums of each row `[n, 32]`, in place."""
    width = 1
    while width < _ROW:
        pairs = rows.view(rows.shape[0], -1, 2, width)
        pairs[:, :, 0].addcmul_(pairs[:, :, 1, :1], powers[:, None, -width:])
        width *= 2


def _scan_by_doubling(y: Tensor, cu_seqlens: Tensor, decay: float | Tensor, longest: int) -> Tensor:
    """Suffix sums in place and returned; `longest` is at least the number of entries of the longest sequence."""
    lengths = cu_seqlens.diff()
    entry = torch.arange(y.numel(), device=y.device)
    behind = torch.repeat_interleave(cu_seqlens[1:] - 1, lengths, output_size=y.numel()) - entry
    rate = decay
    if isinstance(decay, Tensor):
        rate = torch.repeat_interleave(decay, lengths, output_size=y.numel())
    width = 1
    while width < longest:
        # where, not a product with a mask: 0 * inf of the next sequence would be NaN
        window = torch.where(behind[:-width] >= width, y[width:], 0.0)
        y[:-width] += window * (rate[:-width] if isinstance(rate, Tensor) else rate)
        rate = rate * rate
        width *= 2
    return y
