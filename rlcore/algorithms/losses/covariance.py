"""How `clip_cov` and `kl_cov` choose tokens: by the covariance of log-prob and advantage.

A token's covariance is `(advantage - mean) * (old log-prob - mean)`, the means over all tokens of
the step. Its mean is the covariance proper, whose size is how fast the step lowers the entropy.
`batch_stats` of the losses keeps the two means and a threshold, three or four numbers; from them
every micro-batch recomputes the covariances of its tokens bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlcore.algorithms.token_hash import token_uniform
from rlcore.algorithms.types import PolicyLossInputs

if TYPE_CHECKING:
    from torch import Tensor

NO_DRAW = -1.0  # below every draw: with it as the last draw, no token is chosen


def step_means(inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return `advantage_mean` and `logprob_mean` of the whole step, float64; 0 of no tokens."""
    return {
        "advantage_mean": _mean(_as_held(inputs.advantages)),
        "logprob_mean": _mean(_as_held(inputs.old_logprobs)),
    }


def token_covariance(inputs: PolicyLossInputs, means: Mapping[str, Tensor]) -> Tensor:
    """Return the covariance of each token, float64 `[M]`, elementwise: the same in every split."""
    advantages = _as_held(inputs.advantages)
    logprobs = _as_held(inputs.old_logprobs)
    return (advantages - means["advantage_mean"]) * (logprobs - means["logprob_mean"])


def token_draws(inputs: PolicyLossInputs) -> Tensor:
    """Return the random number in [0, 1) that belongs to each token, float64 `[M]`."""
    assert inputs.sequence_ids is not None
    return token_uniform(inputs.sequence_ids, inputs.cu_seqlens, inputs.num_tokens)


def last_draw(draws: Tensor, count: int) -> Tensor:
    """Return the largest of the `count` smallest draws: those up to it are chosen."""
    return draws.kthvalue(count).values if count else draws.new_tensor(NO_DRAW)


def count_of(ratio: float, inputs: PolicyLossInputs) -> int:
    """Return how many tokens of the step `ratio` stands for, rounded down, but one at least."""
    return max(int(ratio * inputs.num_tokens), 1)


def check_ratio(name: str, ratio: float) -> None:
    """Refuse a share of the tokens outside (0, 1]."""
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{name}: expected a number in (0, 1], got {ratio}")


def _as_held(x: Tensor) -> Tensor:
    """Round to float32, as the ranks have these vectors, before computing in float64."""
    return x.detach().float().double()


def _mean(x: Tensor) -> Tensor:
    """Average in float64, which is exact where all values are equal.

    float64 holds the sum of fewer than 2^29 equal float32 numbers.
    """
    return x.sum() / max(x.numel(), 1)
