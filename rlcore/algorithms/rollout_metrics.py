"""Metrics of a step, from the ragged vectors of the whole batch and from its conversations.

A metric is absent, never 0, if the batch lacks a field that the metric needs. The segments of a
rollout count as one sequence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.corrections import mismatch_vectors, stale_tokens
from rlcore.algorithms.errors import InputError
from rlcore.algorithms.kl import kl_clamped
from rlcore.algorithms.moments import MetricSpec, Moments
from rlcore.algorithms.ragged import (
    group_count,
    group_index,
    group_mean_std,
    mean_and_variance,
    pieces,
    segment_lengths,
    segment_sum,
    without_gradient,
)
from rlcore.algorithms.rollouts import Rollouts
from rlcore.algorithms.types import EstimatorInputs

if TYPE_CHECKING:
    from torch import Tensor


BATCH_METRICS = tuple(MetricSpec(*row) for row in (
    ("objective/scores", "outcome reward", "sequences", "reward"),
    ("objective/kl", "token sum of the raw KL estimate (algorithm.kl.reward_kind) against the "
     "reference", "sequences", "nats"),
    ("objective/non_score_reward", "-reward_coef * objective/kl (open-instruct's page prints the "
     "other sign)", "sequences", "reward"),
    ("objective/rlhf_reward", "objective/scores + objective/non_score_reward",
     "sequences", "reward"),
    ("objective/entropy", "token sum of the policy's entropy", "sequences", "nats"),
    ("objective/verifiable_correct_rate", "1 where the verifier accepted the answer",
     "all sequences with a verdict", "share"),
    ("val/sequence_lengths", "trainable tokens", "all sequences", "tokens"),
    ("val/sequence_lengths_min", "trainable tokens of the shortest sequence", "-", "tokens"),
    ("val/sequence_lengths_max", "trainable tokens of the longest sequence", "-", "tokens"),
    ("val/num_stop_token_ids", "sequences that ended with a stop token, of all", "-", "sequences"),
    ("val/stop_token_rate", "1 where the sequence ended with a stop token",
     "all sequences", "share"),
    ("rollout/rewarded_truncated", "1 where the sequence ended by a limit (length, context, turns, "
     "timeout)", "sequences with at least the mean reward", "share"),
    ("rollout/rewarded_prompt_overlap", "share of the runs of three tokens of the response, its "
     "last 512 tokens, that stand in the prompt",
     "sequences with at least the mean reward", "share"),
    ("rollout/commonest_response", "1 where the response is the text that most of them are",
     "sequences", "share"),
    ("val/explained_variance", "1 - var(returns - values) / var(returns); absent where the returns "
     "do not vary", "tokens", "share"),
    ("rollout/reward", "outcome reward", "all sequences", "reward"),
    ("rollout/reward_std", "standard deviation of the outcome reward",
     "all sequences - 1", "reward"),
    ("rollout/baseline_reward", "outcome reward of the greedy response to the same prompt "
     "(estimators that need it)", "all sequences", "reward"),
    ("rollout/zero_std_groups", "groups of two or more sequences whose rewards are all equal",
     "-", "groups"),
    ("rollout/singleton_groups", "groups of one sequence", "-", "groups"),
    ("rollout/staleness_mean", "training steps between the weights that made the token and those "
     "that it trains", "tokens", "steps"),
    ("rollout/staleness_max", "most such steps", "-", "steps"),
    ("correction/stale_fraction", "1 where the token is older than allowed, and so not trained on",
     "tokens", "share"),
))  # fmt: skip


@without_gradient
def rollout_metrics(
    inputs: EstimatorInputs,
    *,
    finish_reasons: Sequence[str] | None = None,
    responses: Sequence[str] | None = None,
    prompt_overlap: Tensor | None = None,
    entropy: Tensor | None = None,
    correct: Tensor | None = None,
    returns: Tensor | None = None,
    reward_coef: float | None = None,
    version: int | None = None,
    max_staleness: int | None = None,
) -> dict[str, float]:
    """Return the metrics of one step's batch, by their published names.

    Args:
        inputs: the whole batch with every field that was computed, whatever the estimator takes.
        finish_reasons: `B` of "stop", "length" and so on; that of a rollout is its last segment's.
        responses: `B` texts; that of a rollout is its last segment's.
        prompt_overlap: float `[B]`, the share of each response's n-grams that stand in its prompt.
        entropy: float `[M]`, of the policy at each token.
        correct: bool or float `[B]`, whether a verifier accepted the answer; NaN where none was
            asked.
        returns: float `[M]`, the targets of the critic.
        reward_coef: `algorithm.kl.reward_coef`.
        version: the policy version that is about to be trained.
        max_staleness: tokens older than this many versions are not trained on (see `stale_tokens`).
    """
    per_sequence = {"correct": correct, "prompt_overlap": prompt_overlap}
    _check(inputs, finish_reasons, per_sequence, {"entropy": entropy, "returns": returns})
    sequences = _Sequences(inputs, Rollouts.of(inputs.rollout_ids))
    metrics = _scores(sequences, entropy, correct, reward_coef)
    metrics |= _responses(sequences, finish_reasons)
    metrics |= _gaming(sequences, finish_reasons, responses, prompt_overlap)
    metrics |= _groups(sequences)
    metrics |= _distances(inputs)
    if inputs.versions is not None and version is not None:
        metrics |= staleness_metrics(inputs.versions, version, max_staleness)
    if inputs.values is not None and returns is not None:
        share = explained_variance(inputs.values, returns)
        metrics |= {} if share is None else {"val/explained_variance": share}
    return metrics


@dataclass(frozen=True)
class _Sequences:
    """The sequences of a batch, those of one rollout taken together."""

    inputs: EstimatorInputs
    rollouts: Rollouts | None

    @property
    def sizes(self) -> Tensor:
        """Trainable tokens of each, int64."""
        lengths = segment_lengths(self.inputs.cu_seqlens)
        return lengths if self.rollouts is None else self.rollouts.total(lengths)

    def sums(self, per_token: Tensor) -> Tensor:
        """Sum a vector `[M]` over the tokens of each, float64."""
        sums = segment_sum(per_token.double(), self.inputs.cu_seqlens)
        return sums if self.rollouts is None else self.rollouts.total(sums)

    def shared(self, per_sequence: Tensor, name: str) -> Tensor:
        """Return the value of each from a vector `[B]`, in which segments have the same."""
        return per_sequence if self.rollouts is None else self.rollouts.shared(per_sequence, name)

    def last(self, per_sequence: Sequence[str]) -> list[str]:
        """Return the value of the last segment of each."""
        if self.rollouts is None:
            return [*per_sequence]
        return [per_sequence[i] for i in self.rollouts.last.tolist()]


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """Return `1 - var(returns - values) / var(returns)`; None where the returns do not vary."""
    if returns.numel() < 2:
        return None
    variance = float(mean_and_variance(returns)[1])
    return (
        1.0 - float(mean_and_variance(returns, minus=values)[1]) / variance
        if variance > 0
        else None
    )


def _scores(
    sequences: _Sequences, entropy: Tensor | None, correct: Tensor | None, reward_coef: float | None
) -> dict[str, float]:
    """Return metrics of sequences, without those that have no trainable token."""
    inputs = sequences.inputs
    counted = sequences.sizes > 0
    metrics: dict[str, float] = {}

    def put(name: str, per_sequence: Tensor) -> None:
        if per_sequence.numel():
            metrics[name] = float(per_sequence.double().mean())

    put("objective/scores", sequences.shared(inputs.rewards, "rewards")[counted])
    if inputs.kl is not None:
        put("objective/kl", sequences.sums(inputs.kl)[counted])
    if entropy is not None:
        put("objective/entropy", sequences.sums(entropy)[counted])
    if (
        reward_coef is not None
        and (reward_coef == 0 or "objective/kl" in metrics)
        and "objective/scores" in metrics
    ):
        penalty = -reward_coef * metrics["objective/kl"] if reward_coef else 0.0
        metrics["objective/non_score_reward"] = penalty
        metrics["objective/rlhf_reward"] = metrics["objective/scores"] + penalty
    if correct is not None:
        verdicts = sequences.shared(correct.double(), "correct")
        put("objective/verifiable_correct_rate", verdicts[~verdicts.isnan()])
    return metrics


def _responses(sequences: _Sequences, finish_reasons: Sequence[str] | None) -> dict[str, float]:
    """Return lengths and ends of all sequences, empty ones included."""
    if sequences.inputs.num_sequences == 0:
        return {}
    sizes = sequences.sizes.double()
    metrics = {
        "val/sequence_lengths": float(sizes.mean()),
        "val/sequence_lengths_min": float(sizes.min()),
        "val/sequence_lengths_max": float(sizes.max()),
    }
    if finish_reasons is not None:
        ends = sequences.last(finish_reasons)
        stopped = sum(reason == "stop" for reason in ends)
        metrics["val/num_stop_token_ids"] = float(stopped)
        metrics["val/stop_token_rate"] = stopped / len(ends)
    return metrics


_LIMITS = frozenset({"length", "context", "turns", "timeout"})


def _gaming(
    sequences: _Sequences,
    finish_reasons: Sequence[str] | None,
    responses: Sequence[str] | None,
    prompt_overlap: Tensor | None,
) -> dict[str, float]:
    """Return signs of a gamed reward, over sequences with a trainable token."""
    counted = sequences.sizes > 0
    if not bool(counted.any()):
        return {}
    metrics: dict[str, float] = {}
    rewards = sequences.shared(sequences.inputs.rewards, "rewards").double()
    # A float64 sum may round the mean of equal rewards above them.
    rewarded = counted & (rewards >= rewards[counted].mean().clamp(max=rewards[counted].max()))
    if finish_reasons is not None:
        ends = torch.tensor([reason in _LIMITS for reason in sequences.last(finish_reasons)])
        metrics["rollout/rewarded_truncated"] = float(ends[rewarded].double().mean())
    if prompt_overlap is not None:
        if sequences.rollouts is not None:
            prompt_overlap = prompt_overlap[sequences.rollouts.last]
        metrics["rollout/rewarded_prompt_overlap"] = float(prompt_overlap[rewarded].mean())
    if responses is not None:
        texts = Counter(compress(sequences.last(responses), counted.tolist()))
        metrics["rollout/commonest_response"] = max(texts.values()) / texts.total()
    return metrics


def _groups(sequences: _Sequences) -> dict[str, float]:
    """Return rewards of all sequences, and groups of those with a trainable token."""
    metrics: dict[str, float] = {}
    inputs = sequences.inputs
    rewards = sequences.shared(inputs.rewards, "rewards").double()
    if rewards.numel():
        metrics["rollout/reward"] = float(rewards.mean())
    if inputs.baseline_rewards is not None and rewards.numel():
        baselines = sequences.shared(inputs.baseline_rewards, "baseline_rewards")
        metrics["rollout/baseline_reward"] = float(baselines.double().mean())
    if rewards.numel() > 1:
        metrics["rollout/reward_std"] = float(rewards.std())
    counted = sequences.sizes > 0
    rewards = rewards[counted]
    groups = sequences.shared(inputs.group_ids, "group_ids")[counted]
    if rewards.numel():
        alone = group_count(groups) == 1
        flat = (group_mean_std(rewards, groups)[1] == 0) & ~alone
        metrics["rollout/singleton_groups"] = float(group_index(groups[alone])[1])
        metrics["rollout/zero_std_groups"] = float(group_index(groups[flat])[1])
    return metrics


def _distances(inputs: EstimatorInputs) -> dict[str, float]:
    """Return means over tokens, from reference and engine, reduced as those of an update."""
    moments = Moments()
    if inputs.kl is not None:
        for (kl,) in pieces(inputs.kl):
            moments.add("rollout/kl", kl)
    if inputs.logprobs is not None and inputs.ref_logprobs is not None:
        for logprobs, reference in pieces(inputs.logprobs, inputs.ref_logprobs):
            moments.add("rollout/kl_clamped_share", kl_clamped(logprobs, reference))
    if inputs.logprobs is not None and inputs.rollout_logprobs is not None:
        for logprobs, rollout in pieces(inputs.logprobs, inputs.rollout_logprobs):
            moments.update(mismatch_vectors(logprobs, rollout))
    return moments.reduce()


def staleness_metrics(
    versions: Tensor,
    version: int,
    max_staleness: int | None = None,
    *,
    lengths: Tensor | None = None,
) -> dict[str, float]:
    """Return the staleness of a batch's tokens; {} without tokens.

    Args:
        versions: int64 `[M]`, the version that made each token; with `lengths` `[S]`, each span.
        version, max_staleness: as in `rollout_metrics`.
        lengths: int64 `[S]`, tokens of each span, above 0.
    """
    if versions.numel() == 0:
        return {}
    tokens = versions.numel() if lengths is None else int(lengths.sum())
    total = (versions if lengths is None else versions * lengths).sum()
    metrics = {
        "rollout/staleness_mean": version - int(total) / tokens,
        "rollout/staleness_max": float(version - versions.min()),
    }
    if max_staleness is not None:
        stale = stale_tokens(versions, version, max_staleness)
        count = (stale if lengths is None else lengths[stale]).sum()
        metrics["correction/stale_fraction"] = int(count) / tokens
    return metrics


def _check(
    inputs: EstimatorInputs,
    finish_reasons: Sequence[str] | None,
    per_sequence: dict[str, Tensor | None],
    per_token: dict[str, Tensor | None],
) -> None:
    if finish_reasons is not None and len(finish_reasons) != inputs.num_sequences:
        raise InputError(
            f"finish_reasons: expected B = {inputs.num_sequences} of them, got"
            f" {len(finish_reasons)}"
        )
    for vectors, size, symbol in (
        (per_sequence, inputs.num_sequences, "[B]"),
        (per_token, inputs.num_tokens, "[M]"),
    ):
        for name, value in vectors.items():
            if value is not None and tuple(value.shape) != (size,):
                raise InputError(
                    f"{name}: expected shape {symbol} = [{size}], got {list(value.shape)}"
                )


# --- conversations --------------------------------------------------------------------------------

PREFIX = "conversation/"
DROPPED = "untrained_"  # prefix of the counts of untrained tokens; their reason follows it

CONVERSATION_METRICS = tuple(MetricSpec(PREFIX + name, *row) for name, *row in (
    ("turns", "turns of the model", "rollouts", "turns"),
    ("branches", "branches besides the first", "rollouts", "branches"),
    ("tool_calls", "calls of tools", "rollouts", "calls"),
    ("tool_errors", "calls that were answered with an error", "rollouts", "calls"),
    ("generated_tokens", "tokens that the model wrote", "rollouts", "tokens"),
    ("trained_tokens", "of these, tokens that are trainable in a sample", "rollouts", "tokens"),
    (DROPPED + "<reason>", "of these, tokens that are trainable in none, for this reason",
     "rollouts", "tokens"),
    ("merge_ratio", "trained_tokens / generated_tokens", "generated tokens", "share"),
    ("context_tokens", "tokens of prompts, results of tools and other messages", "rollouts",
     "tokens"),
    ("engine_s", "waiting for turns, those of branches added up", "rollouts", "s"),
    ("tool_s", "waiting for tools", "rollouts", "s"),
    ("cached_tokens", "tokens of prompts that the engine had cached; absent if not reported",
     "rollouts", "tokens"),
    ("prefilled_tokens", "tokens of prompts that it computed; likewise", "rollouts", "tokens"),
    ("<name>", "any number that a workflow gave to `Conversation.measure`", "rollouts that have it",
     "as given"),
))  # fmt: skip


def conversation_metrics(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over rollouts, by published names; {} where no rollout has measurements.

    Args:
        measured: the measurements of each rollout, by name.
    """
    rows = [row for row in measured if row]
    found: dict[str, float] = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        count = len(rows) if name.startswith(DROPPED) else len(values)
        found[PREFIX + name] = math.fsum(values) / count
    generated = math.fsum(row.get("generated_tokens", 0.0) for row in rows)
    if generated:
        trained = math.fsum(row.get("trained_tokens", 0.0) for row in rows)
        found[PREFIX + "merge_ratio"] = trained / generated
    return found
