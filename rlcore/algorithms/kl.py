"""Estimates of KL(policy || reference) from the log-probs of sampled tokens.

The KL penalty enters the reward in `reward_shaping`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from rlcore.algorithms.errors import known_names

if TYPE_CHECKING:
    from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8 is far outside any trust region and far inside float32


def clamped_log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return `logprobs - other` clamped to +-20, so that its exp is finite; NaN stays NaN.

    The gradient is 1 inside the limits and 0 beyond them, never inf.
    """
    return clamp_log_ratio(logprobs - other)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Return a log-ratio clamped to +-20, so that its exp is finite; NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def approx_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each token, elementwise.

    With `d = logprobs - ref_logprobs`, clamped to +-20 for every kind:

        k1: d                    unbiased, may be negative
        k2: d^2 / 2              biased, with an unbiased gradient of the KL
        k3: exp(-d) - 1 + d      unbiased, never negative

    J. Schulman, "Approximating KL divergence", 2020. The output itself is not clamped; `kl_clamped`
    marks tokens at the limit.
    """
    if kind not in get_args(KLKind):
        raise ValueError(
            f"kind: unknown KL estimate {kind!r}; {known_names(str(kind), get_args(KLKind))}"
        )
    d = clamped_log_ratio(logprobs, ref_logprobs)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    # expm1, since exp(-d) - 1 + d cancels to noise for small d.
    return torch.expm1(-d) + d


def loss_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: KLKind = "k3",
    *,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Return the KL term of a loss at each token, `[M]`, plain or with an unbiased gradient.

    Without `old_logprobs` this is `approx_kl(logprobs, ref_logprobs, kind)` and what autograd makes
    of it, as in GRPO. On tokens sampled from the policy itself its expected gradient is then,
    whatever the value estimates,

        k1: 0      k2: grad KL(policy || ref)      k3: grad KL(ref || policy)

    With `old_logprobs`, of the policy that sampled the tokens, and `r = exp(logprobs -
    old_logprobs)` clamped:

        k1, k3: r * k, with the gradient through both
        k2:     sg(r) * k2

    Then the gradient of the expectation over a token drawn from the old policy, given the tokens
    before it, is exactly that of KL(policy || ref), for r = 1 and any other r. The value of k1 and
    k3 is that KL in expectation too; k2's is not, as ever. For k2 the gradient must not pass
    through r: `d` times the score is all of it.

    Unbiased k3: DeepSeek-V3.2, arXiv:2512.02556; k2 and the table: Y. Tang and R. Munos,
    arXiv:2506.09477.
    """
    kl = approx_kl(logprobs, ref_logprobs, kind)
    if old_logprobs is None:
        return kl
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    return (ratio.detach() if kind == "k2" else ratio) * kl


def kl_clamped(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return 1 where `|logprobs - ref_logprobs|` exceeds 20, else 0, in the dtype of `logprobs`."""
    return ((logprobs - ref_logprobs).detach().abs() > LOG_RATIO_LIMIT).to(logprobs.dtype)
