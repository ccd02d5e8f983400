"""The contract tests for losses: ours keep every rule, each wrong one breaks its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import (
    PolicyLoss,
    PolicyLossInputs,
    build_policy_loss,
    policy_loss_names,
    segment_lengths,
    segment_sum,
)
from rlcore.algorithms.testing import ContractError, check_policy_loss
from rlcore.algorithms.testing import policy_loss as policy_loss_rules

from .helpers import plugin_id

Loss = Callable[[PolicyLossInputs], PolicyLoss]


@pytest.mark.parametrize("name", policy_loss_names())
def test_our_losses_keep_the_contract(name: str) -> None:
    report = check_policy_loss(name)
    assert {rule.name for rule in report.skipped} <= {"unweighted"}
    assert len(report.kept) >= 9


def test_their_options_keep_it_too_with_losses() -> None:
    check_policy_loss("ppo_clip", seed=2, clip_low=0.1, clip_high=0.3, dual_clip=2.0)
    check_policy_loss("clip_cov", clip_cov_ratio=0.2)
    check_policy_loss("kl_cov", kl_cov_ratio=0.3)


# Policy losses. `plain` is right.


def plain(inputs: PolicyLossInputs) -> PolicyLoss:
    ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20).exp()
    return PolicyLoss(-inputs.advantages * ratio, {"ratio": ratio.detach()})


def loss_writes(write: Callable[[Tensor], object]) -> Loss:
    def loss(inputs: PolicyLossInputs) -> PolicyLoss:
        result = plain(inputs)
        if inputs.num_tokens:
            write(inputs.advantages)
        return result

    return loss


def mean_of_the_batch(inputs: PolicyLossInputs) -> PolicyLoss:
    loss = plain(inputs).per_token
    return PolicyLoss(loss.mean().expand_as(loss))


def normalised_inside(inputs: PolicyLossInputs) -> PolicyLoss:
    return PolicyLoss(plain(inputs).per_token / max(inputs.num_tokens, 1))


def reduced(inputs: PolicyLossInputs) -> PolicyLoss:
    return PolicyLoss(plain(inputs).per_token.sum())


def detached(inputs: PolicyLossInputs) -> PolicyLoss:
    return PolicyLoss(plain(inputs).per_token.detach())


def exp_then_clamp(inputs: PolicyLossInputs) -> PolicyLoss:
    ratio = (inputs.logprobs - inputs.old_logprobs).exp().clamp(max=5.0)
    return PolicyLoss(-inputs.advantages * ratio)


def masked_product(inputs: PolicyLossInputs) -> PolicyLoss:
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return PolicyLoss(-inputs.advantages * (ratio * (ratio < 10)))  # inf * 0


def narrow_mean(inputs: PolicyLossInputs) -> PolicyLoss:
    log_ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20)
    if log_ratio.dtype == torch.float32:
        log_ratio = log_ratio.bfloat16().float()
    return PolicyLoss(-inputs.advantages * log_ratio.exp())


def weighted(inputs: PolicyLossInputs) -> PolicyLoss:
    return PolicyLoss(plain(inputs).per_token * inputs.weights)  # type: ignore[operator]


weighted.needs = {"weights"}  # type: ignore[attr-defined]


def undeclared_entropy(inputs: PolicyLossInputs) -> PolicyLoss:
    return PolicyLoss(plain(inputs).per_token - 0.01 * inputs.entropy)  # type: ignore[operator]


def dropout(inputs: PolicyLossInputs) -> PolicyLoss:
    return PolicyLoss(plain(inputs).per_token * (torch.rand(inputs.num_tokens) > 0.2))


def first_of_the_micro_batch(inputs: PolicyLossInputs) -> PolicyLoss:
    return PolicyLoss(plain(inputs).per_token - inputs.logprobs[:1].detach().sum())


def sequence_mean_of_nothing(inputs: PolicyLossInputs) -> PolicyLoss:
    means = segment_sum(inputs.logprobs - inputs.old_logprobs, inputs.cu_seqlens) / segment_lengths(
        inputs.cu_seqlens
    )
    worst = means.detach().isnan().any()  # an empty sequence makes it true
    return PolicyLoss(plain(inputs).per_token * torch.where(worst, 2.0, 1.0))


def metric_of_the_batch(inputs: PolicyLossInputs) -> PolicyLoss:
    result = plain(inputs)
    mean = result.per_token.detach().mean() if inputs.num_tokens else 0.0
    return PolicyLoss(result.per_token, {"mean": torch.zeros_like(inputs.advantages) + mean})


def largest_ratio(inputs: PolicyLossInputs) -> PolicyLoss:
    (inputs.logprobs - inputs.old_logprobs).max()
    return plain(inputs)


class OptionalEntropy:
    optional = ("entropy",)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        return undeclared_entropy(inputs)


class QuantileOfTheStep:
    """Right: what it needs from the whole step it takes in `batch_stats`."""

    def batch_stats(self, inputs: PolicyLossInputs) -> dict[str, Tensor]:
        return {"middle": inputs.advantages.sum() / max(inputs.num_tokens, 1)}

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        assert inputs.batch_stats is not None
        ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20).exp()
        return PolicyLoss(-(inputs.advantages - inputs.batch_stats["middle"]) * ratio)


class QuantileOfTheMicroBatch(QuantileOfTheStep):
    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20).exp()
        return PolicyLoss(-(inputs.advantages - self.batch_stats(inputs)["middle"]) * ratio)


WRONG_LOSSES: list[tuple[Any, str]] = [
    (loss_writes(lambda x: x.mul_(2)), "read-only"),
    (loss_writes(lambda x: x.data.mul_(2)), "read-only"),
    (loss_writes(lambda x: x.numpy().__setitem__(0, 9.0)), "read-only"),
    (mean_of_the_batch, "micro-batches"),
    (normalised_inside, "micro-batches"),
    (metric_of_the_batch, "micro-batches"),
    (QuantileOfTheMicroBatch, "micro-batches"),
    (reduced, "outputs"),
    (detached, "outputs"),
    (undeclared_entropy, "declared-fields"),
    (dropout, "deterministic"),
    (first_of_the_micro_batch, "micro-batches"),
    (sequence_mean_of_nothing, "empty-sequences"),
    (largest_ratio, "no-tokens"),
    (weighted, "unweighted"),
    (narrow_mean, "float32"),
    (exp_then_clamp, "float32"),
    (masked_product, "float32"),
    (OptionalEntropy, "optional-fields"),
]


@pytest.mark.parametrize(("loss", "rule"), WRONG_LOSSES, ids=plugin_id)
def test_a_wrong_loss_is_caught(loss: Loss, rule: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_policy_loss(loss)
    assert caught.value.rule.name == rule, str(caught.value)


def test_no_rule_is_without_a_loss_that_breaks_it() -> None:
    assert {rule for _, rule in WRONG_LOSSES} == {rule.name for rule in policy_loss_rules._RULES}


def test_right_losses_pass_in_any_form() -> None:
    for form in (plain, QuantileOfTheStep, QuantileOfTheStep(), build_policy_loss("ppo_clip")):
        check_policy_loss(form)
    with pytest.raises(TypeError, match="clip_low: this is built already"):
        check_policy_loss(build_policy_loss("ppo_clip"), clip_low=0.1)
