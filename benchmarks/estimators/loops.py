"""Computes advantages in two plain ways: scipy's filter by sequence, a loop over padded time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from scipy.signal import lfilter
from torch import Tensor


def filter_sequences(x: np.ndarray, borders: Sequence[int], decay: float) -> np.ndarray:
    """`y_t = x_t + decay * y_{t+1}` in each sequence, in the dtype of `x`: the bare recurrence, on
    one core.
    """
    y = np.empty_like(x)
    numerator = np.array([1.0], x.dtype)
    denominator = np.array([1.0, -decay], x.dtype)
    for start, end in itertools.pairwise(borders):
        y[start:end] = lfilter(numerator, denominator, x[start:end][::-1])[::-1]
    return y


def deltas(
    values: Tensor, kl: Tensor, rewards: Tensor, cu_seqlens: Tensor, *, gamma: float, kl_coef: float
) -> np.ndarray:
    """What the recurrence of `ppo` runs on, float64 `[M]`, a sequence at a time."""
    v = values.double().cpu().numpy()
    penalty = kl.double().cpu().numpy()
    outcome = rewards.double().cpu().numpy()
    borders = cu_seqlens.tolist()
    delta = np.empty_like(v)
    for b, (start, end) in enumerate(itertools.pairwise(borders)):
        delta[start:end] = -kl_coef * penalty[start:end] - v[start:end]
        delta[start : end - 1] += gamma * v[start + 1 : end]
        delta[end - 1] += outcome[b]
    return delta


def pad(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`[M]` to `[B, longest]`, zeros behind each sequence."""
    return torch.nn.utils.rnn.pad_sequence(
        list(x.split(cu_seqlens.diff().tolist())), batch_first=True
    )


def unpad(x: Tensor, mask: Tensor) -> Tensor:
    """`[B, longest]` to `[M]`."""
    return x[mask.bool()]


def padded_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, `[longest, B]`, of float `[longest, B]`: time first, so that each
    step is contiguous.
    """
    advantages = torch.empty_like(values)
    following = torch.zeros_like(values[0])
    running = torch.zeros_like(values[0])
    for t in range(len(values) - 1, -1, -1):
        delta = rewards[t] + gamma * following - values[t]
        running = (delta + gamma * lam * running) * mask[t]
        following = values[t] * mask[t]
        advantages[t] = running
    return advantages, advantages + values
