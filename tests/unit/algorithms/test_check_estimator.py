"""The contract tests for plugin authors: ours keep every rule, and each wrong plugin is caught under the right one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import (
    Advantages,
    EstimatorInputs,
    KeywordError,
    PolicyLoss,
    PolicyLossInputs,
    build_estimator,
    build_policy_loss,
    discounted_suffix_sum,
    estimator_keywords,
    estimator_names,
    expand_to_tokens,
    group_count,
    group_mean_std,
    last_token_index,
    policy_loss_names,
    register_estimator,
    segment_index,
    segment_lengths,
    segment_mean,
    segment_sum,
    whiten,
)
from rlcore.algorithms.testing import ContractError, check_estimator, check_policy_loss
from rlcore.algorithms.testing import estimator as estimator_rules
from rlcore.algorithms.testing import policy_loss as policy_loss_rules
from rlcore.algorithms.testing.batches import PER_SEQUENCE, Layout, estimator_batch, policy_loss_batch, tensors

OF_THE_WHOLE_BATCH = {"gpg"}  # its scale counts the groups that teach nothing
Estimator = Callable[[EstimatorInputs], Advantages]
Loss = Callable[[PolicyLossInputs], PolicyLoss]


@pytest.mark.parametrize("name", estimator_names())
def test_our_estimators_keep_the_contract(name: str) -> None:
    report = check_estimator(name, uses_batch=name in OF_THE_WHOLE_BATCH)
    assert [rule.name for rule in report.skipped] == (["group-split"] if name in OF_THE_WHOLE_BATCH else [])
    assert len(report.kept) + len(report.skipped) == 16


@pytest.mark.parametrize("name", [name for name in estimator_names() if "kl_coef" in estimator_keywords(name)])
def test_and_so_they_do_with_rewards_of_tokens(name: str) -> None:
    check_estimator(name, kl_coef=0.3, distill_coef=0.2)


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("grpo", {"leave_one_out": True}), ("grpo", {"normalize_std": False}), ("ppo", {"gamma": 0.99, "lam": 0.0}),
        ("reinforce++", {"gamma": 0.9}),
    ],
)  # fmt: skip
def test_their_options_keep_it_too(name: str, keywords: dict[str, Any]) -> None:
    check_estimator(name, seed=3, **keywords)


def test_what_looks_at_the_whole_batch_must_say_so() -> None:
    with pytest.raises(ContractError, match="breaks the rule 'group-split'"):
        check_estimator("gpg")


@pytest.mark.parametrize("name", policy_loss_names())
def test_our_losses_keep_the_contract(name: str) -> None:
    report = check_policy_loss(name)
    assert {rule.name for rule in report.skipped} <= {"unweighted"}
    assert len(report.kept) >= 12


def test_their_options_keep_it_too_with_losses() -> None:
    check_policy_loss("ppo_clip", seed=2, clip_low=0.1, clip_high=0.3, dual_clip=2.0)
    check_policy_loss("clip_cov", clip_cov_ratio=0.2)
    check_policy_loss("kl_cov", kl_cov_ratio=0.3)


# Estimators, right and wrong. `Mean` is right; every wrong one is `Mean` with one mistake.


def residuals(inputs: EstimatorInputs) -> Tensor:
    """Reward less the mean of its group, 0 for a sequence without tokens."""
    member = segment_lengths(inputs.cu_seqlens) > 0
    mean, _ = group_mean_std(inputs.rewards[member], inputs.group_ids[member])
    out = torch.zeros_like(inputs.rewards)
    out[member] = (inputs.rewards[member].double() - mean).to(out.dtype)
    return out


def right(inputs: EstimatorInputs) -> Advantages:
    return Advantages(expand_to_tokens(residuals(inputs), inputs.cu_seqlens))


class Mean:
    """The right one as a class, with a keyword."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        return Advantages(self.scale * right(inputs).advantages)


def writes(write: Callable[[Tensor], object], field: str = "kl") -> Estimator:
    def estimator(inputs: EstimatorInputs) -> Advantages:
        result = right(inputs).advantages
        value = getattr(inputs, field)
        if value.numel():
            write(value)
        return Advantages(result)

    estimator.needs = {"kl"}  # type: ignore[attr-defined]
    return estimator


def by_pairs(inputs: EstimatorInputs) -> Advantages:
    count = inputs.num_sequences
    rewards = inputs.rewards.view(-1, 2) if count % 2 == 0 else inputs.rewards.view(1, -1)
    return Advantages(expand_to_tokens((rewards - rewards.mean(1, keepdim=True)).flatten(), inputs.cu_seqlens))


def by_fixed_size(inputs: EstimatorInputs) -> Advantages:
    rewards = inputs.rewards.view(-1, 8)
    return Advantages(expand_to_tokens((rewards - rewards.mean(1, keepdim=True)).flatten(), inputs.cu_seqlens))


def ids_as_index(inputs: EstimatorInputs) -> Advantages:
    count = inputs.rewards.new_zeros(64).index_add(0, inputs.group_ids, torch.ones_like(inputs.rewards))
    sums = inputs.rewards.new_zeros(64).index_add(0, inputs.group_ids, inputs.rewards)
    return Advantages(expand_to_tokens(inputs.rewards - (sums / count)[inputs.group_ids], inputs.cu_seqlens))


def first_is_baseline(inputs: EstimatorInputs) -> Advantages:
    first = inputs.rewards[:1].nan_to_num().sum()
    return Advantages(right(inputs).advantages + first)


def leaks_over_borders(inputs: EstimatorInputs) -> Advantages:
    ours = right(inputs).advantages
    return Advantages(ours.flip(0).cumsum(0).flip(0))


def counts_empty(inputs: EstimatorInputs) -> Advantages:
    mean, _ = group_mean_std(inputs.rewards.nan_to_num(), inputs.group_ids)
    return Advantages(expand_to_tokens(inputs.rewards.nan_to_num().double() - mean, inputs.cu_seqlens).to(inputs.rewards.dtype))


def reads_reward_of_empty(inputs: EstimatorInputs) -> Advantages:
    mean, _ = group_mean_std(inputs.rewards, inputs.group_ids)
    return Advantages(expand_to_tokens((inputs.rewards - mean).to(inputs.rewards.dtype), inputs.cu_seqlens))


def zero_times_reward_of_empty(inputs: EstimatorInputs) -> Advantages:
    return Advantages(right(inputs).advantages + 0.0 * inputs.rewards.sum())


def last_token_of_nothing(inputs: EstimatorInputs) -> Advantages:
    out = inputs.rewards.new_zeros(inputs.num_tokens)
    out[inputs.cu_seqlens[1:] - 1] = residuals(inputs)  # an empty sequence writes on the token of its neighbour
    return Advantages(out)


def reads_undeclared(inputs: EstimatorInputs) -> Advantages:
    return Advantages(right(inputs).advantages - 0.1 * inputs.kl)  # type: ignore[operator]


def silent_without_undeclared(inputs: EstimatorInputs) -> Advantages:
    penalty = 0.0 if inputs.values is None else inputs.values
    return Advantages(right(inputs).advantages - penalty)


def batch_mean(inputs: EstimatorInputs) -> Advantages:
    member = segment_lengths(inputs.cu_seqlens) > 0
    scores = torch.where(member, inputs.rewards, 0.0)
    scores = scores - scores.sum() / member.sum().clamp(min=1)
    return Advantages(expand_to_tokens(scores, inputs.cu_seqlens))


def whitened(inputs: EstimatorInputs) -> Advantages:
    return Advantages(whiten(right(inputs).advantages))


def one_pass_variance(inputs: EstimatorInputs) -> Advantages:
    member = segment_lengths(inputs.cu_seqlens) > 0
    rewards, ids = inputs.rewards[member], inputs.group_ids[member]
    _, group = torch.unique(ids, return_inverse=True)
    count = torch.bincount(group)

    def mean(x: Tensor) -> Tensor:
        return (x.new_zeros(count.numel()).index_add(0, group, x) / count)[group]

    std = (mean(rewards**2) - mean(rewards) ** 2).sqrt()
    return Advantages(((rewards - mean(rewards)) / (std + 1e-6)).repeat_interleave(segment_lengths(inputs.cu_seqlens)[member]))


def one_pass_clamped(inputs: EstimatorInputs) -> Advantages:
    member = segment_lengths(inputs.cu_seqlens) > 0
    rewards, ids = inputs.rewards[member], inputs.group_ids[member]
    _, group = torch.unique(ids, return_inverse=True)
    count = torch.bincount(group)

    def mean(x: Tensor) -> Tensor:
        return (x.new_zeros(count.numel()).index_add(0, group, x) / count)[group]

    std = (mean(rewards**2) - mean(rewards) ** 2).clamp(min=0).sqrt()
    return Advantages(((rewards - mean(rewards)) / (std + 1e-6)).repeat_interleave(segment_lengths(inputs.cu_seqlens)[member]))


def nan_when_alone(inputs: EstimatorInputs) -> Advantages:
    out = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        member = (inputs.group_ids == group) & (segment_lengths(inputs.cu_seqlens) > 0)
        rewards = inputs.rewards[member]
        out[member] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return Advantages(expand_to_tokens(out, inputs.cu_seqlens))


def no_eps(inputs: EstimatorInputs) -> Advantages:
    member = segment_lengths(inputs.cu_seqlens) > 0
    rewards, ids = inputs.rewards[member].double(), inputs.group_ids[member]
    mean, std = group_mean_std(rewards, ids)
    std = torch.where(group_count(ids) > 1, std, 1.0)
    scores = ((rewards - mean) / std).to(inputs.rewards.dtype)
    return Advantages(scores.repeat_interleave(segment_lengths(inputs.cu_seqlens)[member]))


def global_running_sum(inputs: EstimatorInputs) -> Advantages:
    """Reward-to-go as a difference of sums over the whole batch: small sequences drown in large neighbours."""
    shaped = inputs.rewards.new_zeros(inputs.num_tokens)
    shaped[last_token_index(inputs.cu_seqlens)] = inputs.rewards[segment_lengths(inputs.cu_seqlens) > 0]
    behind = torch.cat([shaped.cumsum(0), shaped.new_zeros(1)])
    ends = behind[inputs.cu_seqlens[1:] - 1][segment_index(inputs.cu_seqlens)]
    return Advantages(ends - behind[:-1] + shaped)


def accumulates_in_bfloat16(inputs: EstimatorInputs) -> Advantages:
    narrow = inputs.rewards.dtype == torch.float32
    result = right(inputs).advantages
    return Advantages(result.bfloat16().float() if narrow else result)


def exp_before_clamp(inputs: EstimatorInputs) -> Advantages:
    ratio = (inputs.logprobs - inputs.rollout_logprobs).exp()  # type: ignore[operator]
    return Advantages(right(inputs).advantages * ratio)


exp_before_clamp.needs = {"logprobs", "rollout_logprobs"}  # type: ignore[attr-defined]


def noisy(inputs: EstimatorInputs) -> Advantages:
    return Advantages(right(inputs).advantages + torch.rand(inputs.num_tokens))


class Stateful:
    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        result = Advantages(right(inputs).advantages - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * float(inputs.rewards.nansum())
        return result


class Learned:
    def __init__(self) -> None:
        self.scale = torch.ones(1, requires_grad=True)

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        with torch.enable_grad():
            return Advantages(right(inputs).advantages * self.scale)


class Critic:
    needs = ("values",)

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        return right(inputs)


class Optional:
    optional = ("token_rewards",)

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        return Advantages(right(inputs).advantages + inputs.token_rewards)  # type: ignore[operator]


def per_sequence(inputs: EstimatorInputs) -> Advantages:
    return Advantages(residuals(inputs))


def integers(inputs: EstimatorInputs) -> Advantages:
    return Advantages(right(inputs).advantages.long())


def bare_tensor(inputs: EstimatorInputs) -> Advantages:
    return right(inputs).advantages  # type: ignore[return-value]


def top_of_the_batch(inputs: EstimatorInputs) -> Advantages:
    inputs.rewards.max()  # of nothing it raises
    return right(inputs)


def reads_memory(inputs: EstimatorInputs) -> Advantages:
    raw = inputs.rewards.as_strided((inputs.num_sequences,), (1,))
    return Advantages(expand_to_tokens(raw, inputs.cu_seqlens))


WRONG_ESTIMATORS: list[tuple[Any, str]] = [
    (writes(lambda x: x.mul_(0.1)), "read-only"),
    (writes(lambda x: x.data.mul_(0.1)), "read-only"),
    (writes(lambda x: x.numpy().__setitem__(0, 7.0)), "read-only"),
    (writes(lambda x: x.sub_(x.mean()), field="rewards"), "read-only"),
    (by_pairs, "group-ids"),
    (by_fixed_size, "group-ids"),
    (ids_as_index, "group-ids"),
    (first_is_baseline, "permutation"),
    (leaks_over_borders, "permutation"),
    (counts_empty, "empty-sequences"),
    (reads_reward_of_empty, "empty-sequences"),
    (zero_times_reward_of_empty, "empty-sequences"),
    (last_token_of_nothing, "empty-sequences"),
    (reads_undeclared, "declared-fields"),
    (silent_without_undeclared, "declared-fields"),
    (batch_mean, "group-split"),
    (whitened, "group-split"),
    (global_running_sum, "group-split"),
    (one_pass_variance, "constant-rewards"),
    (one_pass_clamped, "extremes"),
    (exp_before_clamp, "extremes"),
    (nan_when_alone, "group-of-one"),
    (no_eps, "constant-rewards"),
    (accumulates_in_bfloat16, "float32"),
    (noisy, "deterministic"),
    (Stateful, "deterministic"),
    (Learned, "outputs"),
    (Critic, "returns"),
    (Optional, "optional-fields"),
    (per_sequence, "outputs"),
    (integers, "outputs"),
    (bare_tensor, "outputs"),
    (top_of_the_batch, "no-tokens"),
]


def ids(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


@pytest.mark.parametrize(("estimator", "rule"), WRONG_ESTIMATORS, ids=ids)
@pytest.mark.filterwarnings("ignore:std")
def test_a_wrong_estimator_is_caught(estimator: Estimator, rule: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_estimator(estimator)
    assert caught.value.rule.name == rule, str(caught.value)
    name = getattr(estimator, "__qualname__", "")
    assert str(caught.value).startswith(f"estimator {name!r} breaks the rule {rule!r}: {caught.value.rule.sentence}\n")
    assert f"to do: {caught.value.rule.advice}" in str(caught.value)


def test_memory_is_not_read() -> None:
    with pytest.raises(ContractError, match="breaks the rule 'storage'"):
        check_estimator(reads_memory, uses_batch=True)


@pytest.mark.parametrize("estimator", [batch_mean, whitened])
def test_an_estimator_may_declare_that_it_uses_the_batch(estimator: Estimator) -> None:
    assert [rule.name for rule in check_estimator(estimator, uses_batch=True).skipped] == ["group-split"]


def test_a_random_estimator_is_held_to_the_rules_that_remain() -> None:
    report = check_estimator(noisy, random=True)
    assert {rule.name for rule in report.kept} >= {"outputs", "read-only", "group-of-one", "no-tokens", "constant-rewards"}
    assert {rule.name for rule in report.skipped} >= {"deterministic", "permutation", "float32"}
    with pytest.raises(ContractError, match="'read-only'"):
        check_estimator(writes(lambda x: x.mul_(torch.rand(1))), random=True)


def test_the_message_shows_the_smallest_example() -> None:
    with pytest.raises(ContractError) as caught:
        check_estimator(by_pairs)
    lines = str(caught.value).splitlines()
    assert lines[1] == "  lengths [1, 1, 1, 1]"
    assert lines[2].startswith("  rewards [")
    assert lines[3] == "  group_ids [0, 1, 0, 1]"
    assert lines[4] == "  change: sequences in the order [0, 2, 1, 3]"
    assert re.match(r"  advantages of sequence 0, token 0: expected -?0.\d+, got -?\d.\d+ \(4 of 4 tokens", lines[5])
    assert lines[6].startswith("  to do: number the groups with group_index(inputs.group_ids)")


def test_the_cause_of_an_exception_is_kept() -> None:
    with pytest.raises(ContractError, match="RuntimeError: shape") as caught:
        check_estimator(by_fixed_size)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_report_can_be_printed() -> None:
    lines = str(check_estimator(whitened, uses_batch=True)).splitlines()
    assert lines[0] == "estimator 'whitened' keeps 15 rules, 1 skipped"
    assert lines[1].split() == ["kept", "declared-fields", *lines[1].split()[2:]]
    assert lines[-1].split() == ["skipped", "group-split", "uses_batch=True"]


@pytest.mark.usefixtures("clean_registry")
def test_an_estimator_comes_in_any_form() -> None:
    register_estimator("registered mean")(Mean)
    forms: list[Any] = [
        Mean, Mean(), partial(Mean, scale=2.0), lambda: Mean(scale=3.0), "registered mean", f"{__name__}:Mean",
        build_estimator("registered mean"),
    ]  # fmt: skip
    for form in forms:
        assert len(check_estimator(form, random=True).kept) == 7
    assert len(check_estimator(right).kept) == 16
    assert check_estimator(Mean, scale=2.0).subject == "estimator 'Mean'"
    with pytest.raises(KeywordError, match="unknown keyword 'scael'"):
        check_estimator(Mean, scael=2.0)
    with pytest.raises(TypeError, match="scale: the estimator is built already"):
        check_estimator(Mean(), scale=2.0)


def test_the_declaration_of_a_decorated_class_goes_with_its_instances() -> None:
    from rlcore.algorithms.estimators.ppo import PPO

    for form in (PPO(kl_coef=0.2), lambda: PPO(kl_coef=0.2)):
        assert len(check_estimator(form, random=True).kept) == 7


def test_a_seed_gives_one_verdict() -> None:
    messages = set()
    for _ in range(2):
        with pytest.raises(ContractError) as caught:
            check_estimator(one_pass_variance, seed=5)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_batches_have_every_field_and_know_what_belongs_to_a_sequence() -> None:
    layout = Layout((2, 0, 3), (0, 0, 1))
    for record, absent in ((estimator_batch(layout, 0), set()), (policy_loss_batch(layout, 0), {"batch_stats"})):
        present = dict(tensors(record))
        assert {field.name for field in fields(record)} - set(present) == absent
        per_sequence = {name for name, value in present.items() if value.numel() == 3}
        assert per_sequence == PER_SEQUENCE & set(present)


def test_it_needs_torch_alone() -> None:
    others = {"pytest", "hypothesis", "scipy", "megatron"}
    code = f"import sys, rlcore.algorithms.testing; print(sorted({others} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "[]"


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
    means = segment_sum(inputs.logprobs - inputs.old_logprobs, inputs.cu_seqlens) / segment_lengths(inputs.cu_seqlens)
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


def loss_reads_memory(inputs: PolicyLossInputs) -> PolicyLoss:
    raw = inputs.advantages.as_strided((inputs.num_tokens,), (1,))
    return PolicyLoss(-raw * (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20).exp())


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
    (first_of_the_micro_batch, "permutation"),
    (sequence_mean_of_nothing, "empty-sequences"),
    (largest_ratio, "no-tokens"),
    (weighted, "unweighted"),
    (narrow_mean, "float32"),
    (exp_then_clamp, "extremes"),
    (masked_product, "extremes"),
    (OptionalEntropy, "optional-fields"),
    (loss_reads_memory, "storage"),
]


@pytest.mark.parametrize(("loss", "rule"), WRONG_LOSSES, ids=ids)
def test_a_wrong_loss_is_caught(loss: Loss, rule: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_policy_loss(loss)
    assert caught.value.rule.name == rule, str(caught.value)


def test_no_rule_is_without_a_plugin_that_breaks_it() -> None:
    assert {rule for _, rule in WRONG_ESTIMATORS} | {"storage"} == {rule.name for rule in estimator_rules._RULES}
    assert {rule for _, rule in WRONG_LOSSES} == {rule.name for rule in policy_loss_rules._RULES}


def test_right_losses_pass_in_any_form() -> None:
    for form in (plain, QuantileOfTheStep, build_policy_loss("ppo_clip"), lambda: QuantileOfTheStep()):
        check_policy_loss(form)
    with pytest.raises(TypeError, match="clip_low: the loss is built already"):
        check_policy_loss(build_policy_loss("ppo_clip"), clip_low=0.1)


def test_helpers_named_in_advice_do_what_it_says() -> None:
    """The rules point at these: discounted sums stop at borders, the mean of nothing is 0."""
    x, borders = torch.ones(3), torch.tensor([0, 2, 2, 3])
    assert discounted_suffix_sum(x, borders, 1.0).tolist() == [2, 1, 1]
    assert segment_mean(x, borders).tolist() == [1, 0, 1]
