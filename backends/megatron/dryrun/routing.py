"""A choice of experts that a dry run assumes: even, or with more tokens for this rank's experts."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def assumed_choice(tokens: int, experts: int, topk: int, own: range, skew: float) -> Tensor:
    """A choice of `topk` different experts a token: bool [tokens, experts].

    Each expert in `own` gets `skew` times the even share of the tokens, the others the rest evenly.
    Systematic sampling: the shares are laid end to end, and a token takes the experts at the points
    u, u + 1, ... for a u of its own; no share is longer than 1, so they differ.
    """
    even = topk / experts
    shares = torch.full((experts,), even, dtype=torch.float64)
    if skew != 1 and len(own) < experts:
        shares[own.start : own.stop] = skew * even
        shares[shares == even] = (topk - skew * even * len(own)) / (experts - len(own))
    ends = shares.cumsum(0)
    # spread over the tokens, so that every sequence and every slice of the pack is alike
    starts = (torch.arange(tokens, dtype=torch.float64) * 0.6180339887498949) % 1
    starts = (starts.argsort().argsort() + 0.5) / tokens
    points = starts[:, None] + torch.arange(topk)
    chosen = torch.searchsorted(ends, points.clamp(max=float(ends[-1]) - 1e-9), right=True)
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
