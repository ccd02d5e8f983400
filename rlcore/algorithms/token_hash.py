"""Hashes of tokens: random numbers that belong to each, and n-grams that are found again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.ragged import expand_to_tokens, segment_index

if TYPE_CHECKING:
    from torch import Tensor

# Constants of splitmix64 (G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number
# generators", 2014), written as the signed integers that have these 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

MAX_RESPONSE = 512  # last tokens of a sequence that are searched for repetitions of its prompt


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


def prompt_overlap(
    tokens: Tensor, cu_tokens: Tensor, loss_mask: Tensor, group_ids: Tensor, *, n: int = 3
) -> Tensor:
    """Return the share of each response's n-grams of tokens that its prompt holds, float64 `[B]`.

    It is 0 where a response has no n-gram. An n-gram of a response has trainable tokens alone; the
    prompt is what stands before the first of these.

    Args:
        tokens, loss_mask: `[T]`.
        cu_tokens: int64 `[B+1]`.
        group_ids: int64 `[B]`; the prompts of a group are looked through together.
    """
    sequences = segment_index(cu_tokens, tokens.numel())
    shares = torch.zeros(cu_tokens.numel() - 1, dtype=torch.float64)
    count = tokens.numel() - n + 1
    if count < 1:
        return shares
    trained = loss_mask.bool()
    keys = mix64(group_ids.long())[sequences[:count]]
    inside = sequences[:count] == sequences[n - 1 :]
    response = inside.clone()
    for offset in range(n):
        keys = mix64(keys + tokens[offset : offset + count].long() * _GOLDEN)
        response &= trained[offset : offset + count]
    # before the first trainable token, and at most so far from the end of the sequence
    begun = trained.cumsum(0)
    begun = begun - torch.cat([begun.new_zeros(1), begun])[cu_tokens[:-1]][sequences]
    prompt = inside & (begun[n - 1 :] == 0)
    left = cu_tokens[1:][sequences[:count]] - torch.arange(count)
    response &= left <= MAX_RESPONSE
    found = torch.isin(keys[response], keys[prompt].unique()).double()
    owners = sequences[:count][response]
    hits = shares.index_add(0, owners, found)
    return hits / shares.index_add(0, owners, torch.ones_like(found)).clamp(min=1)
