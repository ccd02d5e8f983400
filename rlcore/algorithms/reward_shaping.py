"""Per-token rewards: process rewards, KL penalty, distillation; the outcome on the last token.

All sums are float64: next to an outcome of 1e4, a KL of 1e-3 would be lost in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.ragged import add_, segment_lengths, segment_sum
from rlcore.algorithms.rollouts import Rollouts
from rlcore.algorithms.types import EstimatorInputs

if TYPE_CHECKING:
    from torch import Tensor


def token_terms(
    inputs: EstimatorInputs, kl_coef: float = 0.0, distill_coef: float = 0.0
) -> Tensor | None:
    """Return the reward of each token except the outcome, new float64 `[M]`; None without terms.

        token_rewards_t - kl_coef * kl_t + distill_coef * (teacher_logprobs_t - logprobs_t)

    `token_rewards` count where the inputs have them; a field whose coefficient is 0 is not read.
    The last term is on-policy distillation: its mean over the policy's own samples is minus the KL
    to the teacher.
    """
    if inputs.token_rewards is None and kl_coef == 0.0 and distill_coef == 0.0:
        return None
    if inputs.token_rewards is None:
        terms = inputs.rewards.new_zeros(inputs.num_tokens, dtype=torch.float64)
    else:
        terms = inputs.token_rewards.to(torch.float64, copy=True)
    if kl_coef != 0.0:
        add_(terms, require(inputs.kl, "kl"), -kl_coef)
    if distill_coef != 0.0:
        add_(terms, require(inputs.teacher_logprobs, "teacher_logprobs"), distill_coef)
        add_(terms, require(inputs.logprobs, "logprobs"), -distill_coef)
    return terms


def shaped_rewards(
    inputs: EstimatorInputs, kl_coef: float = 0.0, distill_coef: float = 0.0
) -> Tensor:
    """Return `token_terms` plus the outcome reward on the last token of each sequence.

    The result is a new float64 `[M]`.

    The outcome stands at the end of each segment of a rollout, together with what the tokens of its
    later segments earn: sums to go, without a discount, are those of the rollout in one piece. The
    reward of an empty sequence is on no token and is not read.
    """
    shaped = token_terms(inputs, kl_coef, distill_coef)
    outcomes = inputs.rewards.double()
    if shaped is None:
        shaped = inputs.rewards.new_zeros(inputs.num_tokens, dtype=torch.float64)
    elif (rollouts := Rollouts.of(inputs.rollout_ids)) is not None:
        outcomes = outcomes + rollouts.later(segment_sum(shaped, inputs.cu_seqlens))
    nonempty = segment_lengths(inputs.cu_seqlens) > 0
    last = inputs.cu_seqlens[1:][nonempty] - 1
    return shaped.index_add_(0, last, outcomes[nonempty])


def shaped_returns(
    inputs: EstimatorInputs, kl_coef: float = 0.0, distill_coef: float = 0.0
) -> Tensor:
    """Return the outcome and all `token_terms` of each sequence's rollout, float64 `[B]`.

    An empty sequence that is a rollout of its own has its outcome reward.
    """
    terms = token_terms(inputs, kl_coef, distill_coef)
    outcomes = inputs.rewards.double()
    if terms is None:
        return outcomes
    totals = segment_sum(terms, inputs.cu_seqlens)
    if (rollouts := Rollouts.of(inputs.rollout_ids)) is not None:
        totals = rollouts.total(totals)[rollouts.index]
    return outcomes + totals


def shaping_needs(kl_coef: float, distill_coef: float) -> set[str]:
    """Return the fields of `EstimatorInputs` that the coefficients which are not 0 read."""
    needs = {"kl"} if kl_coef != 0.0 else set()
    return needs | {"teacher_logprobs", "logprobs"} if distill_coef != 0.0 else needs


def require(value: Tensor | None, name: str) -> Tensor:
    """Return a field that `needs` promised; None means that the estimator declared too little."""
    assert value is not None, f"{name} is read but not declared in needs"
    return value


class ShapedEstimator:
    """The base of estimators that reward single tokens: it checks and keeps their coefficients.

    A negative coefficient would reverse the effect of its term.
    """

    def __init__(self, *, kl_coef: float = 0.0, distill_coef: float = 0.0) -> None:
        for name, value in (("kl_coef", kl_coef), ("distill_coef", distill_coef)):
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name}: expected a number >= 0, got {value}")
        self.kl_coef = kl_coef
        self.distill_coef = distill_coef


def check_unit_interval(name: str, value: float) -> None:
    """Refuse a discount outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value}")
