"""Estimators that learn from preferences: their advantages are the gradients of written losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import (
    Advantages,
    EstimatorInputs,
    KeywordError,
    OutputError,
    build_estimator,
)
from rlcore.algorithms.registry import guard_estimator

PAIRS = 5
LENGTHS = [4, 1, 7, 3, 3, 9, 2, 5, 6, 1]
CU = torch.tensor([0, *LENGTHS]).cumsum(0)
# Members of a pair lie apart, and either comes first.
GROUPS = torch.tensor([7, 3, 7, 9, 1, 3, 5, 1, 9, 5])
REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1, 0, 0])


def inputs(seed: int = 0, **changes: Any) -> EstimatorInputs:
    generator = torch.Generator().manual_seed(seed)
    count = int(CU[-1])
    given = {
        "cu_seqlens": CU, "rewards": REWARDS, "group_ids": GROUPS,
        "logprobs": -torch.rand(count, generator=generator, dtype=torch.float64) * 3,
        "ref_logprobs": -torch.rand(count, generator=generator, dtype=torch.float64) * 3,
    }  # fmt: skip
    return EstimatorInputs(**given | changes)


def written(batch: EstimatorInputs, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """(the losses, their mean's gradient for each token), pair by pair from the definition."""
    tokens = batch.logprobs.clone().requires_grad_()  # type: ignore[union-attr]
    sums = torch.stack([part.sum() for part in tokens.split(LENGTHS)])
    before = torch.stack([part.sum() for part in batch.ref_logprobs.split(LENGTHS)])
    losses = []
    for group in GROUPS.unique().tolist():
        (c,) = ((group == GROUPS) & (REWARDS == 1)).nonzero()[0].tolist()
        (r,) = ((group == GROUPS) & (REWARDS == 0)).nonzero()[0].tolist()
        losses.append(loss(sums[c], sums[r], before[c], before[r], LENGTHS[c], LENGTHS[r]))
    found = torch.stack(losses)
    return found.detach(), torch.autograd.grad(found.mean(), tokens)[0]


def margin(c: Tensor, r: Tensor, pc: Tensor, pr: Tensor) -> Tensor:
    return (c - r) - (pc - pr)


def nll(x: Tensor) -> Tensor:
    return -torch.log(torch.sigmoid(x))


def odds(logprob: Tensor) -> Tensor:
    return torch.log(logprob.exp() / (1 - logprob.exp()))


B, S = 0.3, 0.2
LOSSES: dict[str, tuple[str, dict[str, Any], Callable[..., Tensor]]] = {
    "dpo": ("dpo", {"beta": B}, lambda c, r, pc, pr, *_: nll(B * margin(c, r, pc, pr))),
    "cdpo": ("dpo", {"beta": B, "label_smoothing": S}, lambda c, r, pc, pr, *_: (
        (1 - S) * nll(B * margin(c, r, pc, pr)) + S * nll(-B * margin(c, r, pc, pr)))),
    "rpo": ("dpo", {"beta": B, "sft_coef": 0.7}, lambda c, r, pc, pr, n, _: (
        nll(B * margin(c, r, pc, pr)) - 0.7 * c / n)),
    "robust": ("dpo", {"beta": B, "kind": "robust", "label_smoothing": S},
        lambda c, r, pc, pr, *_: ((1 - S) * nll(B * margin(c, r, pc, pr))
                                  - S * nll(-B * margin(c, r, pc, pr))) / (1 - 2 * S)),
    "hinge": ("dpo", {"beta": B, "kind": "hinge"},
        lambda c, r, pc, pr, *_: torch.relu(1 - B * margin(c, r, pc, pr))),
    "exo": ("dpo", {"beta": B, "kind": "exo", "label_smoothing": S}, lambda c, r, pc, pr, *_: sum(
        torch.sigmoid(x) * (torch.log(torch.sigmoid(x)) - math.log(p))
        for x, p in ((B * margin(c, r, pc, pr), 1 - S), (-B * margin(c, r, pc, pr), S)))),
    "nca": ("dpo", {"beta": B, "kind": "nca"}, lambda c, r, pc, pr, *_: (
        nll(B * (c - pc)) + 0.5 * nll(-B * (c - pc)) + 0.5 * nll(-B * (r - pr)))),
    "apo_zero": ("dpo", {"beta": B, "kind": "apo_zero"}, lambda c, r, pc, pr, *_: (
        1 - torch.sigmoid(B * (c - pc)) + torch.sigmoid(B * (r - pr)))),
    "apo_down": ("dpo", {"beta": B, "kind": "apo_down"}, lambda c, r, pc, pr, *_: (
        torch.sigmoid(B * (c - pc)) + 1 - torch.sigmoid(B * margin(c, r, pc, pr)))),
    "ipo": ("ipo", {"beta": B}, lambda c, r, pc, pr, n, m: (
        (c - pc) / n - (r - pr) / m - 1 / (2 * B)) ** 2),
    "simpo": ("simpo", {"beta": 2.5, "gamma": 0.6},
        lambda c, r, pc, pr, n, m: nll(2.5 * c / n - 2.5 * r / m - 0.6)),
    "orpo": ("orpo", {"beta": B}, lambda c, r, pc, pr, n, m: (
        -c / n + B * nll(odds(c / n) - odds(r / m)))),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_advantages_are_the_gradient_of_the_loss(case: str) -> None:
    """With weights 1/B on every token, and wherever the answers of a pair are."""
    name, keywords, loss = LOSSES[case]
    batch = inputs()
    losses, gradient = written(batch, loss)
    found = build_estimator(name, **keywords)(batch)
    torch.testing.assert_close(-found.advantages / len(LENGTHS), gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.metrics["preference/loss"], losses, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 2])
def test_kto_reads_every_answer_by_itself(seed: int) -> None:
    """With a step's log-ratio above 0, and below."""
    batch = inputs(seed, rewards=torch.tensor([1.0, 0, 0, 0, 0, 1, 0, 0, 0, 0]))
    tokens = batch.logprobs.clone().requires_grad_()  # type: ignore[union-attr]
    before = batch.ref_logprobs.split(LENGTHS)  # type: ignore[union-attr]
    ratios = [part.sum() - old.sum() for part, old in zip(tokens.split(LENGTHS), before)]
    kl = max(0.0, float(torch.stack(ratios).detach().mean()))
    assert (kl > 0) is (seed == 2)
    losses = [
        2.0 * (1 - torch.sigmoid(B * (ratio - kl)))
        if good
        else 0.5 * (1 - torch.sigmoid(B * (kl - ratio)))
        for ratio, good in zip(ratios, batch.rewards)
    ]
    gradient = torch.autograd.grad(torch.stack(losses).mean(), tokens)[0]
    kto = build_estimator("kto", beta=B, desirable_weight=2.0, undesirable_weight=0.5)
    found = kto(batch)
    torch.testing.assert_close(-found.advantages / len(LENGTHS), gradient, rtol=1e-10, atol=1e-12)
    assert "preference/accuracy" not in found.metrics
    alone = kto(inputs(rewards=torch.ones(10)))
    assert "preference/rejected_reward" not in alone.metrics


def test_metrics_are_of_pairs() -> None:
    metrics = build_estimator("dpo", beta=B)(inputs()).metrics
    assert {len(values) for values in metrics.values()} == {PAIRS}
    margins = metrics["preference/chosen_reward"] - metrics["preference/rejected_reward"]
    assert torch.equal(metrics["preference/margin"], margins)
    assert metrics["preference/accuracy"].tolist() == [float(m > 0) for m in margins]
    assert 0 < float(metrics["preference/accuracy"].mean()) < 1


def test_extreme_answers_stay_finite() -> None:
    """Certain ones, and such as the reference thought of differently by hundreds of nats."""
    count = int(CU[-1])
    for logprobs in (torch.zeros(count), torch.full((count,), -500.0)):
        for case in LOSSES:
            name, keywords, _ = LOSSES[case]
            batch = inputs(logprobs=logprobs, ref_logprobs=-torch.arange(count).float())
            assert build_estimator(name, **keywords)(batch).advantages.isfinite().all()


def test_every_two_answers_of_unequal_rewards_are_a_pair() -> None:
    """Ranks, as of a list of answers: one reward a step, equal ones are no pair."""
    ranks = torch.tensor([3.0, 1, 2, 2, 0, 0, 0, 0, 0, 0])
    batch = inputs(rewards=ranks, group_ids=torch.tensor([4] * 4 + [5] * 6))
    found = build_estimator("dpo", beta=B)(batch)
    assert len(found.metrics["preference/loss"]) == 5
    each = [part[0] for part in found.advantages.split(LENGTHS)]
    assert float(each[0]) > 0 > float(each[1])
    assert sum(map(float, each[:4])) == pytest.approx(0, abs=1e-12)
    assert each[4:] == [0.0] * 6


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("dpo", {"beta": 0.0}, "beta"),
        ("dpo", {"label_smoothing": 0.5}, "below 0.5"),
        ("dpo", {"kind": "exo"}, "above 0"),
        ("dpo", {"kind": "dpop"}, "kind"),
        ("simpo", {"gamma": -1.0}, "gamma"),
        ("kto", {"desirable_weight": -1.0}, "desirable_weight"),
    ],
)
def test_wrong_keywords_are_refused(name: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, KeywordError), match=message):
        build_estimator(name, **keywords)


@pytest.mark.parametrize("values", [torch.zeros(0), 0.5, torch.zeros(2, requires_grad=True)])
def test_metrics_of_an_estimator_are_checked(values: Any) -> None:
    def estimator(batch: EstimatorInputs) -> Advantages:
        return Advantages(torch.zeros(batch.num_tokens), metrics={"mine": values})

    with pytest.raises(OutputError, match="mine"):
        guard_estimator(estimator)(inputs())
