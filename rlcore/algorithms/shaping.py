"""Per-token rewards: the outcome on the last trainable token, the KL penalty on every token."""

from __future__ import annotations

from torch import Tensor

from rlcore.algorithms.ragged import last_token_index, segment_lengths
from rlcore.algorithms.types import EstimatorInputs


def shaped_rewards(inputs: EstimatorInputs, kl_coef: float = 0.0) -> Tensor:
    """Return `token_rewards_t - kl_coef * kl_t + outcome reward where t is the last token`, a new tensor `[M]`.

    `token_rewards` count where the inputs have them; the KL is read only where `kl_coef` is not 0. The outcome reward
    of an empty sequence is on no token.
    """
    nonempty = segment_lengths(inputs.cu_seqlens) > 0
    outcome = inputs.rewards.new_zeros(inputs.num_tokens)
    shaped = outcome.index_copy(0, last_token_index(inputs.cu_seqlens), inputs.rewards[nonempty])
    if inputs.token_rewards is not None:
        shaped = shaped + inputs.token_rewards
    if kl_coef != 0.0:
        shaped = shaped - kl_coef * require(inputs.kl, "kl")
    return shaped


def require(value: Tensor | None, name: str) -> Tensor:
    """Return a field that `needs` promised; None means that the estimator declared less than it reads."""
    assert value is not None, f"{name} is read but not declared in needs"
    return value


def check_kl_coef(kl_coef: float) -> None:
    """Refuse a coefficient that would reward distance from the reference, or that is no number."""
    if not 0.0 <= kl_coef < float("inf"):
        raise ValueError(f"kl_coef: expected a number >= 0, got {kl_coef}")


def check_unit_interval(name: str, value: float) -> None:
    """Refuse a discount outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value}")
