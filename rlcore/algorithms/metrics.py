"""The metrics of a step that follow from the whole batch, computed once from ragged vectors. See `METRICS`.

What a metric needs and the batch lacks makes the metric absent, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.algorithms.errors import InputError
from rlcore.algorithms.kl import approx_kl, clamped_log_ratio, kl_clamped
from rlcore.algorithms.ragged import group_count, group_index, group_mean_std, segment_lengths, segment_sum
from rlcore.algorithms.types import EstimatorInputs


@torch.no_grad()
def rollout_metrics(
    inputs: EstimatorInputs,
    *,
    finish_reasons: Sequence[str] | None = None,
    lengths: Tensor | None = None,
    entropy: Tensor | None = None,
    correct: Tensor | None = None,
    returns: Tensor | None = None,
    reward_coef: float | None = None,
    version: int | None = None,
) -> dict[str, float]:
    """Return the metrics of one step's batch, by their published names.

    Args:
        inputs: the whole batch with every field that was computed, whatever the estimator takes.
        finish_reasons: `B` of "stop", "length" or "abort".
        lengths: integer `[B]`, the response tokens of each sequence; by default its trainable tokens.
        entropy: float `[M]`, of the policy at each token.
        correct: bool or float `[B]`, whether a verifier accepted the answer; NaN where none was asked.
        returns: float `[M]`, the targets of the critic.
        reward_coef: `algorithm.kl.reward_coef`.
        version: the policy version that is about to be trained.
    """
    _check(inputs, finish_reasons, {"lengths": lengths, "correct": correct}, {"entropy": entropy, "returns": returns})
    metrics = _scores(inputs, entropy, correct, reward_coef)
    metrics |= _responses(inputs, finish_reasons, lengths)
    metrics |= _groups(inputs)
    metrics |= _off_policy(inputs, version)
    if inputs.values is not None and returns is not None:
        share = explained_variance(inputs.values, returns)
        metrics |= {} if share is None else {"val/explained_variance": share}
    return metrics


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """Return `1 - var(returns - values) / var(returns)` over tokens; None where the returns do not vary."""
    if returns.numel() < 2:
        return None
    variance = float(returns.double().var())
    return 1.0 - float((returns.double() - values.double()).var()) / variance if variance > 0 else None


def _scores(
    inputs: EstimatorInputs, entropy: Tensor | None, correct: Tensor | None, reward_coef: float | None
) -> dict[str, float]:
    """Metrics whose unit is the sequence; sequences without a trainable token are not counted."""
    counted = segment_lengths(inputs.cu_seqlens) > 0
    metrics: dict[str, float] = {}

    def put(name: str, per_sequence: Tensor) -> None:
        if per_sequence.numel():
            metrics[name] = float(per_sequence.double().mean())

    put("objective/scores", inputs.rewards[counted])
    if inputs.kl is not None:
        put("objective/kl", segment_sum(inputs.kl.double(), inputs.cu_seqlens)[counted])
        if inputs.kl.numel():
            metrics["rollout/kl"] = float(inputs.kl.double().mean())
    if entropy is not None:
        put("objective/entropy", segment_sum(entropy.double(), inputs.cu_seqlens)[counted])
    if reward_coef is not None and (reward_coef == 0 or "objective/kl" in metrics) and "objective/scores" in metrics:
        penalty = -reward_coef * metrics["objective/kl"] if reward_coef else 0.0
        metrics["objective/non_score_reward"] = penalty
        metrics["objective/rlhf_reward"] = metrics["objective/scores"] + penalty
    if correct is not None:
        verdicts = correct.double()
        put("objective/verifiable_correct_rate", verdicts[~verdicts.isnan()])
    return metrics


def _responses(
    inputs: EstimatorInputs, finish_reasons: Sequence[str] | None, lengths: Tensor | None
) -> dict[str, float]:
    """Lengths and ends of all sequences, empty ones included."""
    if inputs.num_sequences == 0:
        return {}
    sizes = (segment_lengths(inputs.cu_seqlens) if lengths is None else lengths).double()
    metrics = {
        "val/sequence_lengths": float(sizes.mean()),
        "val/sequence_lengths_min": float(sizes.min()),
        "val/sequence_lengths_max": float(sizes.max()),
    }
    if finish_reasons is not None:
        stopped = sum(reason == "stop" for reason in finish_reasons)
        metrics["val/num_stop_token_ids"] = float(stopped)
        metrics["val/stop_token_rate"] = stopped / len(finish_reasons)
    return metrics


def _groups(inputs: EstimatorInputs) -> dict[str, float]:
    """Rewards of all sequences, and groups of those with a trainable token."""
    metrics: dict[str, float] = {}
    rewards = inputs.rewards.double()
    if rewards.numel():
        metrics["rollout/reward"] = float(rewards.mean())
    if rewards.numel() > 1:
        metrics["rollout/reward_std"] = float(rewards.std())
    counted = segment_lengths(inputs.cu_seqlens) > 0
    rewards, groups = rewards[counted], inputs.group_ids[counted]
    if rewards.numel():
        alone = group_count(groups) == 1
        flat = (group_mean_std(rewards, groups)[1] == 0) & ~alone
        metrics["rollout/singleton_groups"] = float(group_index(groups[alone])[1])
        metrics["rollout/zero_std_groups"] = float(group_index(groups[flat])[1])
    return metrics


def _off_policy(inputs: EstimatorInputs, version: int | None) -> dict[str, float]:
    """Distances between the policies that made, score and train the tokens; means over tokens."""
    metrics: dict[str, float] = {}
    if inputs.num_tokens == 0:
        return metrics
    logprobs, reference, rollout = inputs.logprobs, inputs.ref_logprobs, inputs.rollout_logprobs
    if logprobs is not None and reference is not None:
        metrics["rollout/kl_clamped_share"] = float(kl_clamped(logprobs, reference).double().mean())
    if logprobs is not None and rollout is not None:
        train, engine = logprobs.double(), rollout.double()
        gap = (train - engine).abs()
        weight = clamped_log_ratio(train, engine).exp()
        metrics["rollout/train_rollout_logprob_diff"] = float(gap.mean())
        metrics["rollout/train_rollout_logprob_diff_max"] = float(gap.max())
        metrics["rollout/train_rollout_logprob_diff_kl"] = float(approx_kl(engine, train, "k3").mean())
        metrics["rollout/ess"] = float(weight.sum().square() / (weight.numel() * weight.square().sum()))
    if inputs.versions is not None and version is not None:
        staleness = (version - inputs.versions).double()
        metrics["rollout/staleness_mean"] = float(staleness.mean())
        metrics["rollout/staleness_max"] = float(staleness.max())
    return metrics


def _check(
    inputs: EstimatorInputs,
    finish_reasons: Sequence[str] | None,
    per_sequence: dict[str, Tensor | None],
    per_token: dict[str, Tensor | None],
) -> None:
    if finish_reasons is not None and len(finish_reasons) != inputs.num_sequences:
        raise InputError(f"finish_reasons: expected B = {inputs.num_sequences} of them, got {len(finish_reasons)}")
    for vectors, size, symbol in ((per_sequence, inputs.num_sequences, "[B]"), (per_token, inputs.num_tokens, "[M]")):
        for name, value in vectors.items():
            if value is not None and tuple(value.shape) != (size,):
                raise InputError(f"{name}: expected shape {symbol} = [{size}], got {list(value.shape)}")
