"""The rotary angles of a pack (Su et al. 2021), to the last bit those of transformers.

High frequencies turn a token at position 100,000 by as many radians, of which fp32 keeps two
decimals: another order of the same operations gives other angles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout
from backends.megatron.convert.rope import Rope


@dataclass(frozen=True)
class Angles:
    """The cosine and sine of each slot, by which attention rotates queries and keys."""

    cos: Tensor  # [T, 1, dim/2]
    sin: Tensor
    interleaved: bool
    # [T, 1, 1], by which queries are multiplied; None: by 1
    query_scale: Tensor | None = None


class RotaryPositions:
    """Computes the angles of packs for the layers of a model.

    Args:
        ropes: the positions of each layer; None: a layer without.
    """

    def __init__(self, ropes: Iterable[Rope | None], device: torch.device | int) -> None:
        # Of short and long sequences, or of all. Not buffers: these would follow the model's dtype.
        self._frequencies = {
            rope: [
                inverse_frequencies(rope, long=long).to(device)
                for long in ((False, True) if rope.by_length else (False,))
            ]
            for rope in dict.fromkeys(ropes)
            if rope is not None
        }

    def angles(self, layout: PackLayout) -> dict[Rope, Angles]:
        """The angles of each slot at its position inside its sequence."""
        positions = layout.positions[:, None].float()
        found = {}
        for rope, (frequencies, *others) in self._frequencies.items():
            if others:
                long = layout.sequence_lengths[:, None] > rope.original_length
                frequencies = torch.where(long, others[0], frequencies)
            angles = (positions * frequencies)[:, None]
            cos, sin = (part * rope.attention_factor for part in (angles.cos(), angles.sin()))
            scale = None
            if rope.query_beta:
                lengths = torch.floor(positions / rope.original_length)
                scale = 1 + rope.query_beta * torch.log(1 + lengths)[:, None]
            found[rope] = Angles(cos, sin, rope.interleaved, scale)
        return found


def inverse_frequencies(rope: Rope, *, long: bool = False) -> Tensor:
    """The angle per position of each pair of dimensions: fp32 [dim / 2].

    Before scaling it is theta^(-2i / dim) for pair i. The kinds of scaling:

        linear    divides all by `factor`.
        proportional  the same, and 0 for all pairs but the first.
        llama3    divides low frequencies by `factor`, with a ramp between `low_freq_factor` and
                  `high_freq_factor` turns over the original length.
        yarn      the same between `beta_slow` and `beta_fast` turns, with the ramp linear in i
                  (Peng et al. 2023).
        longrope  divides each by its own factor (Ding et al. 2024).

    Args:
        long: the sequence is longer than the original length; only longrope has other factors then.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    powers = rope.theta**exponents
    if rope.kind == "longrope":
        factors = rope.long_factor if long else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    if rope.kind == "yarn":
        return _yarn(rope, powers)
    frequencies = 1.0 / powers
    if rope.kind == "proportional":
        frequencies[rope.turned_pairs :] = 0.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    scaled = rope.kind in ("linear", "proportional")
    return frequencies / rope.factor if scaled else frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    waves = 2 * math.pi / frequencies
    turns = rope.original_length / waves
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    share = (turns - low) / (high - low)
    mixed = (1 - share) * frequencies / rope.factor + share * frequencies
    is_low = waves > rope.original_length / low
    is_high = waves < rope.original_length / high
    return torch.where(is_low, frequencies / rope.factor, torch.where(is_high, frequencies, mixed))


def _yarn(rope: Rope, powers: Tensor) -> Tensor:
    def pair(turns: float) -> float:
        """The pair that makes so many turns over the original length."""
        spread = math.log(rope.original_length / (turns * 2 * math.pi))
        return rope.dim * spread / (2 * math.log(rope.theta))

    first = pair(rope.beta_fast)
    last = pair(rope.beta_slow)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rope.dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
