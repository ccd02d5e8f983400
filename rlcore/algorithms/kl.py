"""Estimates of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rlcore.algorithms.errors import known_names

KLKind = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8 is far outside any trust region and far inside float32


def clamped_log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return `logprobs - other` clamped to +-20, so that its exp is finite; NaN stays NaN.

    The gradient is 1 inside the limits and 0 beyond them, never inf.
    """
    return (logprobs - other).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def approx_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each token, elementwise.

    With `d = logprobs - ref_logprobs`, clamped to +-20 for every kind:

        k1: d                    unbiased, may be negative
        k2: d^2 / 2              biased, with an unbiased gradient of the KL
        k3: exp(-d) - 1 + d      unbiased, never negative

    J. Schulman, "Approximating KL divergence", 2020. The output itself is not clamped; `kl_clamped` tells where the
    limit was met.
    """
    if kind not in get_args(KLKind):
        raise ValueError(f"kind: unknown KL estimate {kind!r}; {known_names(str(kind), get_args(KLKind))}")
    d = clamped_log_ratio(logprobs, ref_logprobs)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    return torch.expm1(-d) + d  # expm1: exp(-d) - 1 + d cancels to noise for small d


def kl_clamped(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return 1 where `|logprobs - ref_logprobs|` exceeds 20, else 0, in the dtype of `logprobs`."""
    return ((logprobs - ref_logprobs).detach().abs() > LOG_RATIO_LIMIT).to(logprobs.dtype)
