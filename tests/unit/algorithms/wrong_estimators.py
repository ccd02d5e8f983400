"""`Mean`, a right estimator, and wrong ones: `Mean` with one mistake, and the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import (
    Advantages,
    EstimatorInputs,
    GroupedReturns,
    expand_to_tokens,
    group_count,
    group_mean_std,
    last_token_index,
    segment_index,
    segment_lengths,
    whiten,
)

Estimator = Callable[[EstimatorInputs], Advantages]


def residuals(inputs: EstimatorInputs) -> Tensor:
    """Reward less the mean of its group, 0 for a sequence without tokens."""
    member = segment_lengths(inputs.cu_seqlens) > 0
    mean, _ = group_mean_std(inputs.rewards[member], inputs.group_ids[member])
    out = torch.zeros_like(inputs.rewards)
    out[member] = (inputs.rewards[member].double() - mean).to(out.dtype)
    return out


def right(inputs: EstimatorInputs) -> Advantages:
    group = GroupedReturns(inputs)
    return group.advantages(group.residuals)


def spread(scores: Tensor, inputs: EstimatorInputs) -> Advantages:
    """One score a sequence on each of its tokens."""
    return Advantages(expand_to_tokens(scores, inputs.cu_seqlens).to(inputs.rewards.dtype))


def by_segment(inputs: EstimatorInputs) -> Advantages:
    return spread(residuals(inputs), inputs)


def of_parts(score: Callable[[EstimatorInputs, Tensor], Tensor]) -> Estimator:
    """An estimator of the parts of the reward, of sequences with tokens alone."""

    def estimator(inputs: EstimatorInputs) -> Advantages:
        assert inputs.reward_parts is not None
        member = segment_lengths(inputs.cu_seqlens) > 0
        out = torch.zeros_like(inputs.rewards)
        out[member] = score(inputs, member).to(out.dtype)
        return spread(out, inputs)

    estimator.needs = {"reward_parts"}  # type: ignore[attr-defined]
    return estimator


@of_parts
def parts_without_eps(inputs: EstimatorInputs, member: Tensor) -> Tensor:
    assert inputs.reward_parts is not None
    part = inputs.reward_parts[member, 1]
    mean, std = group_mean_std(part, inputs.group_ids[member])
    alone = group_count(inputs.group_ids[member]) == 1
    return torch.where(alone, 0.0, (part.double() - mean) / std)


@of_parts
def parts_against_the_batch(inputs: EstimatorInputs, member: Tensor) -> Tensor:
    assert inputs.reward_parts is not None
    part = inputs.reward_parts[member, 1].double()
    return part - part.mean() if part.numel() else part


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
    return spread((rewards - rewards.mean(1, keepdim=True)).flatten(), inputs)


def by_fixed_size(inputs: EstimatorInputs) -> Advantages:
    rewards = inputs.rewards.view(-1, 8)
    return spread((rewards - rewards.mean(1, keepdim=True)).flatten(), inputs)


def ids_as_index(inputs: EstimatorInputs) -> Advantages:
    nothing = inputs.rewards.new_zeros(64)
    count = nothing.index_add(0, inputs.group_ids, torch.ones_like(inputs.rewards))
    sums = nothing.index_add(0, inputs.group_ids, inputs.rewards)
    return spread(inputs.rewards - (sums / count)[inputs.group_ids], inputs)


def first_is_baseline(inputs: EstimatorInputs) -> Advantages:
    first = inputs.rewards[:1].nan_to_num().sum()
    return Advantages(right(inputs).advantages + first)


def leaks_over_borders(inputs: EstimatorInputs) -> Advantages:
    ours = right(inputs).advantages
    return Advantages(ours.flip(0).cumsum(0).flip(0))


def counts_empty(inputs: EstimatorInputs) -> Advantages:
    rewards = inputs.rewards.nan_to_num()
    return spread(rewards.double() - group_mean_std(rewards, inputs.group_ids)[0], inputs)


def reads_reward_of_empty(inputs: EstimatorInputs) -> Advantages:
    return spread(inputs.rewards - group_mean_std(inputs.rewards, inputs.group_ids)[0], inputs)


def zero_times_reward_of_empty(inputs: EstimatorInputs) -> Advantages:
    return Advantages(right(inputs).advantages + 0.0 * inputs.rewards.sum())


def last_token_of_nothing(inputs: EstimatorInputs) -> Advantages:
    out = inputs.rewards.new_zeros(inputs.num_tokens)
    # an empty sequence writes on the token of its neighbour
    out[inputs.cu_seqlens[1:] - 1] = residuals(inputs)
    return Advantages(out)


def reads_undeclared(inputs: EstimatorInputs) -> Advantages:
    return Advantages(right(inputs).advantages - 0.1 * inputs.kl)  # type: ignore[operator]


def silent_without_undeclared(inputs: EstimatorInputs) -> Advantages:
    penalty = 0.0 if inputs.values is None else inputs.values
    return Advantages(right(inputs).advantages - penalty)


def batch_mean(inputs: EstimatorInputs) -> Advantages:
    samples = GroupedReturns(inputs)
    mean = samples.returns.sum() / max(samples.returns.numel(), 1)
    return samples.advantages(samples.returns - mean)


def whitened(inputs: EstimatorInputs) -> Advantages:
    return Advantages(whiten(right(inputs).advantages))


def one_pass_variance(inputs: EstimatorInputs, *, floor: float | None = None) -> Advantages:
    member = segment_lengths(inputs.cu_seqlens) > 0
    rewards = inputs.rewards[member]
    ids = inputs.group_ids[member]
    _, group = torch.unique(ids, return_inverse=True)
    count = torch.bincount(group)

    def mean(x: Tensor) -> Tensor:
        return (x.new_zeros(count.numel()).index_add(0, group, x) / count)[group]

    variance = mean(rewards**2) - mean(rewards) ** 2
    std = (variance if floor is None else variance.clamp(min=floor)).sqrt()
    return Advantages(
        ((rewards - mean(rewards)) / (std + 1e-6)).repeat_interleave(
            segment_lengths(inputs.cu_seqlens)[member]
        )
    )


def one_pass_clamped(inputs: EstimatorInputs) -> Advantages:
    return one_pass_variance(inputs, floor=0.0)


def nan_when_alone(inputs: EstimatorInputs) -> Advantages:
    out = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        member = (inputs.group_ids == group) & (segment_lengths(inputs.cu_seqlens) > 0)
        rewards = inputs.rewards[member]
        out[member] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return spread(out, inputs)


def no_eps(inputs: EstimatorInputs) -> Advantages:
    member = segment_lengths(inputs.cu_seqlens) > 0
    rewards = inputs.rewards[member].double()
    ids = inputs.group_ids[member]
    mean, std = group_mean_std(rewards, ids)
    std = torch.where(group_count(ids) > 1, std, 1.0)
    scores = ((rewards - mean) / std).to(inputs.rewards.dtype)
    return Advantages(scores.repeat_interleave(segment_lengths(inputs.cu_seqlens)[member]))


def global_running_sum(inputs: EstimatorInputs) -> Advantages:
    """Reward-to-go as a difference of batch-wide sums: small sequences drown in large ones."""
    shaped = inputs.rewards.new_zeros(inputs.num_tokens)
    shaped[last_token_index(inputs.cu_seqlens)] = inputs.rewards[
        segment_lengths(inputs.cu_seqlens) > 0
    ]
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


def assigns(inputs: EstimatorInputs) -> Advantages:
    inputs.rewards -= inputs.rewards.mean()  # type: ignore[misc]
    return right(inputs)


def bare_tensor(inputs: EstimatorInputs) -> Advantages:
    return right(inputs).advantages  # type: ignore[return-value]


def top_of_the_batch(inputs: EstimatorInputs) -> Advantages:
    inputs.rewards.max()  # of nothing it raises
    return right(inputs)


WRONG_ESTIMATORS: list[tuple[Any, str]] = [
    (writes(lambda x: x.mul_(0.1)), "read-only"),
    (writes(lambda x: x.data.mul_(0.1)), "read-only"),
    (writes(lambda x: x.numpy().__setitem__(0, 7.0)), "read-only"),
    (writes(lambda x: x.sub_(x.mean()), field="rewards"), "read-only"),
    (assigns, "read-only"),
    (by_pairs, "permutation"),
    (by_fixed_size, "permutation"),
    (ids_as_index, "permutation"),
    (first_is_baseline, "permutation"),
    (leaks_over_borders, "permutation"),
    (counts_empty, "empty-sequences"),
    (reads_reward_of_empty, "empty-sequences"),
    (zero_times_reward_of_empty, "empty-sequences"),
    (last_token_of_nothing, "empty-sequences"),
    (reads_undeclared, "declared-fields"),
    (silent_without_undeclared, "declared-fields"),
    (batch_mean, "group-split"),
    (parts_against_the_batch, "group-split"),
    (parts_without_eps, "finite"),
    (whitened, "group-split"),
    (global_running_sum, "group-split"),
    (one_pass_variance, "finite"),
    (one_pass_clamped, "float32"),
    (exp_before_clamp, "float32"),
    (nan_when_alone, "finite"),
    (no_eps, "finite"),
    (accumulates_in_bfloat16, "float32"),
    (noisy, "deterministic"),
    (Stateful, "deterministic"),
    (Learned, "outputs"),
    (Critic, "outputs"),
    (Optional, "optional-fields"),
    (per_sequence, "outputs"),
    (integers, "outputs"),
    (bare_tensor, "outputs"),
    (top_of_the_batch, "no-tokens"),
    (by_segment, "rollout-split"),
]
