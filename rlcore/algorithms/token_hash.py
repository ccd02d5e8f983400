"""Random numbers that belong to a token: the same in every layout, order and micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.ragged import expand_to_tokens

if TYPE_CHECKING:
    from torch import Tensor

# Constants of splitmix64 (G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number
# generators", 2014), written as the signed integers that have these 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def token_uniform(
    sequence_ids: Tensor, cu_seqlens: Tensor, num_tokens: int | None = None
) -> Tensor:
    """Return a number in [0, 1) for each token, float64 `[M]`, from its sequence and position.

        u = splitmix64(seed = mix64(sequence_ids[b]), draw = position in the sequence) / 2^64, to 53
        bits

    Args:
        sequence_ids: int64 `[B]`, one identity a sequence. Two sequences of one identity get the
            same numbers.
        cu_seqlens: integer `[B+1]`.
        num_tokens: M, where the caller knows it, which saves a wait for the device.

    Counter-based: nothing is consumed, so the number of a token depends on no other token. 64-bit
    integers wrap in the same way on every device, and so does the result.
    """
    cu_seqlens = cu_seqlens.long()
    seeds = expand_to_tokens(mix64(sequence_ids.long()), cu_seqlens, num_tokens)
    starts = expand_to_tokens(cu_seqlens[:-1], cu_seqlens, num_tokens)
    position = torch.arange(seeds.numel(), device=seeds.device) - starts
    bits = mix64(seeds + (position + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def mix64(x: Tensor) -> Tensor:
    """Scramble the bits of int64 `x`, one to one: the finaliser of splitmix64."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 as if it were unsigned; torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
