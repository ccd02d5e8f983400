"""Neither the order of sequences nor their split into micro-batches changes a gradient.

Parametrised over the registries: a new estimator or loss is tested by being registered.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import (
    AggregationMode,
    EstimatorInputs,
    GuardedPolicyLoss,
    PolicyLossInputs,
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    estimator_names,
    loss_weights,
    normalize_advantages,
    policy_loss_names,
)

from .helpers import cu, permuted, random_inputs

LENGTHS = (5, 0, 1, 7, 0, 3, 12, 1, 2, 9, 0, 4)
ORDER = [7, 3, 0, 11, 1, 9, 5, 2, 10, 4, 6, 8]
# micro-batches, in sequences of ORDER; one holds sequence 10 alone: no tokens
PIECES = (3, 1, 4, 1, 2, 1)
MODES = get_args(AggregationMode)
OPTIONS: dict[str, dict[str, Any]] = {  # where the defaults would leave a small batch alone
    "clip_cov": {"clip_cov_ratio": 0.25, "clip_cov_lb": 0.05},
    "gspo": {"clip_low": 0.1, "clip_high": 0.2},
    "gspo_token": {"clip_low": 0.1, "clip_high": 0.2},
    "kl_cov": {"kl_cov_ratio": 0.25},
    "ppo_clip": {"dual_clip": 1.5},
}
IN_SEQUENCES = {"sequence_ids", "rollout_ids"}


@cache
def batch() -> EstimatorInputs:
    """Groups shuffled, all fields that an estimator may declare."""
    size = sum(LENGTHS)
    generator = torch.Generator().manual_seed(4)
    return random_inputs(
        LENGTHS,
        group_ids=torch.tensor([3, -1, 3, 8, -1, 8, 3, 8, -1, 5, 8, -1]),
        ref_logprobs=-torch.rand(size, generator=generator).double(),
        rollout_logprobs=-torch.rand(size, generator=generator).double(),
        versions=torch.randint(0, 3, (size,), generator=generator),
        rollout_ids=torch.tensor([4, 4, 4, 9, 9, 1, 1, 1, 0, 2, 2, 2]),
    )


@cache
def step() -> dict[str, Tensor]:
    """The fields of a policy loss for one optimizer step, float64."""
    generator = torch.Generator().manual_seed(1)
    old = -torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64).abs()

    def near(x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=torch.float64)

    return {
        "logprobs": near(old), "old_logprobs": old, "ref_logprobs": near(old), "rollout_logprobs":
        near(old),
        "advantages": torch.randn(old.shape, generator=generator, dtype=torch.float64), "entropy":
        near(old).abs(),
        "versions": torch.zeros(old.numel(), dtype=torch.int64),
        "sequence_ids": torch.arange(len(LENGTHS)) + 100,
    }  # fmt: skip


def tokens_of(order: list[int]) -> Tensor:
    borders = cu(LENGTHS).tolist()
    return torch.tensor(
        [t for b in order for t in range(borders[b], borders[b + 1])], dtype=torch.int64
    )


def select(fields: dict[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    """These sequences in this order, with their `cu_seqlens`."""
    sequences = torch.tensor(order, dtype=torch.int64)
    tokens = tokens_of(order)
    chosen = {name: x[sequences if name in IN_SEQUENCES else tokens] for name, x in fields.items()}
    return {**chosen, "cu_seqlens": cu([LENGTHS[b] for b in order])}


def weights_of(mode: AggregationMode, order: list[int], rollout_ids: Tensor | None) -> Tensor:
    """Compute the weights of the step in this order; return them in the order of LENGTHS."""
    ids = None if rollout_ids is None else rollout_ids[torch.tensor(order)]
    weights = loss_weights(mode, cu([LENGTHS[b] for b in order]), norm_length=16, rollout_ids=ids)
    return torch.empty_like(weights).index_copy(0, tokens_of(order), weights).double()


@cache
def built(name: str) -> GuardedPolicyLoss:
    return build_policy_loss(name, **OPTIONS.get(name, {}))


def gradient(
    name: str, fields: dict[str, Tensor], weights: Tensor, order: list[int], pieces: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the gradient `[M]` and the value of `sum(w * l)`, one micro-batch after the other.

    Statistics come from the whole step.
    """
    loss = built(name)
    stats = loss.batch_stats(PolicyLossInputs(**select(fields, order)))  # type: ignore[arg-type]
    logprobs = fields["logprobs"].clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    parts = torch.tensor(order).split(list(pieces))
    for part in parts:
        micro = select({**fields, "logprobs": logprobs, "weights": weights}, part.tolist())
        inputs = PolicyLossInputs(**micro, batch_stats=stats)  # type: ignore[arg-type]
        value = (micro["weights"] * loss(inputs).per_token).sum()
        value.backward()
        total += value.detach()
    assert logprobs.grad is not None
    return logprobs.grad, total


def as_it_is(size: int) -> tuple[list[int], tuple[int, ...]]:
    return list(range(size)), (size,)


@cache
def credit(name: str, order: tuple[int, ...]) -> Tensor:
    """Advantages of the whole batch, estimated in this order and handed back in that of LENGTHS."""
    takes = {"kl_coef": 0.1, "distill_coef": 0.05}
    estimator = build_estimator(
        name, **{k: v for k, v in takes.items() if k in estimator_keywords(name)}
    )
    # segments of a rollout have an order: tests/unit/algorithms/test_rollouts.py
    apart = replace(batch(), rollout_ids=None)
    inputs, tokens = permuted(apart, list(order))
    advantages = estimator(inputs).advantages
    advantages = normalize_advantages(advantages, inputs.cu_seqlens, inputs.group_ids, "batch")
    return torch.empty_like(advantages).index_copy(0, tokens, advantages)


@pytest.mark.parametrize("estimator", estimator_names())
def test_every_estimator_with_every_loss_and_aggregation(estimator: str) -> None:
    """From rewards to the gradient, in one order and one piece, or in another and in many."""
    straight, one = as_it_is(len(LENGTHS))
    for loss in policy_loss_names():
        runs = []
        for order, pieces in ((straight, one), (ORDER, PIECES)):
            fields = {**step(), "advantages": credit(estimator, tuple(order))}
            weights = [weights_of(mode, order, batch().rollout_ids) for mode in MODES]
            runs.append([gradient(loss, fields, w, order, pieces) for w in weights])
        for (whole, value), (split, summed) in zip(*runs):
            assert whole.any(), loss
            torch.testing.assert_close(split, whole, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(summed, value, rtol=1e-11, atol=1e-13)
