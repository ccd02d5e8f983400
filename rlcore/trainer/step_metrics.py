"""The metrics of a step, from rollouts, batch and updates. `METRICS` defines each name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.algorithms import (
    EstimatorInputs,
    Moments,
    conversation_metrics,
    prompt_overlap,
    rollout_metrics,
    staleness_metrics,
)
from rlcore.config import Config
from rlcore.config.built_in import LOSSES
from rlcore.config.derived import updates_per_step
from rlcore.data.batch import RolloutBatch, StepRollouts, UpdateResult
from rlcore.data.packing.plan import MinibatchPlan
from rlcore.planning.shape import ModelShape
from rlcore.trainer.credit import fields_of

# Metrics of a loss that compare the policy with itself before the step.
_AGAINST_BEFORE = frozenset(
    {
        *("policy/approxkl_avg", "policy/dual_clipfrac_avg", "policy/sequence_ratio_avg"),
        *("policy/clipfrac_avg", "policy/clipfrac_high_avg", "policy/clipfrac_low_avg"),
        *("val/ratio", "val/ratio_var", "val/ratio_max"),
    }
)


def constant_metrics(config: Config) -> frozenset[str]:
    """Return the metrics that the configuration fixes at 0 or 1; they are not logged.

    A batch with a single optimizer step compares policy and critic with themselves. A loss that is
    not built in may use these names with another meaning.
    """
    if updates_per_step(config) > 1:
        return frozenset()
    algorithm = config.algorithm
    of_critic = frozenset({"val/clipfrac_avg"})
    if algorithm.old_logprobs == "rollout" or algorithm.loss.name not in LOSSES:
        return of_critic
    return of_critic | _AGAINST_BEFORE


def step_metrics(
    config: Config,
    rollouts: StepRollouts,
    batch: RolloutBatch,
    updates: Sequence[UpdateResult],
    seconds: Mapping[str, float],
    *,
    episodes: int,
) -> dict[str, float]:
    """Compute all metrics of a step except times, constants, and those of its evaluation.

    Args:
        seconds: wall-clock time of the phases so far; "step" is the total.
        episodes: rollouts trained on, including this step.
    """
    of_updates = update_metrics(updates, batch, one_update=updates_per_step(config) == 1)
    for name in constant_metrics(config):
        of_updates.pop(name, None)
    metrics: dict[str, float] = {
        "episode": episodes,
        "epoch": rollouts.epoch,
        **rollouts.metrics,
        **of_updates,
        **_batch_metrics(config, rollouts, batch),
        "perf/tokens_per_second": len(batch.tokens) / seconds["step"],
    }
    if "perf/shared_tokens" in metrics:
        metrics["perf/computed_tokens_per_second"] = metrics["perf/tokens_per_second"] * (
            1.0 - metrics["perf/shared_tokens"]
        )
    if not config.learns_from_rows:
        metrics["perf/trainer_idle_fraction"] = seconds["generation"] / seconds["step"]
    # With asynchronous generation the source measures this fraction.
    if "time/engine" in metrics and config.rollout.max_staleness == 0:
        metrics["perf/engine_idle_fraction"] = max(
            0.0, 1.0 - metrics["time/engine"] / seconds["step"]
        )
    return metrics


def update_metrics(
    updates: Sequence[UpdateResult], batch: RolloutBatch, *, one_update: bool
) -> dict[str, float]:
    """Average over the tokens of all optimizer steps; norms and rates are those of the last step.

    With one optimizer step and no scoring pass, the update itself sees the policy as it was before
    the step, so its KL and entropy are the batch's. With several steps, later ones see a policy
    that has moved.
    """
    if not updates:
        return {}
    moments = Moments()
    for update in updates:
        moments.merge(update.moments)
    metrics = {
        **updates[-1].metrics,
        **moments.reduce(optimizer_steps=len(updates)),
        "train/optimizer_steps": len(updates),
        "train/skipped_updates": sum(update.not_finite for update in updates),
        "train/updates_without_signal": sum(update.without_signal for update in updates),
    }
    if not one_update:
        return {name: value for name, value in metrics.items() if not name.startswith("rollout/")}
    tokens_per_sequence = batch.num_trainable / batch.num_trained_rollouts
    for per_token, per_sequence in (
        ("rollout/kl", "objective/kl"),
        ("policy/entropy_avg", "objective/entropy"),
    ):
        if per_token in metrics:
            metrics[per_sequence] = metrics[per_token] * tokens_per_sequence
    return metrics


def _batch_metrics(config: Config, rollouts: StepRollouts, batch: RolloutBatch) -> dict[str, float]:
    samples = rollouts.samples
    vectors = batch.vectors
    if config.learns_from_rows:
        return {"val/sequence_lengths": batch.num_trainable / batch.num_rollouts, **batch.metrics}
    verdicts = [s.verdict for s in samples]
    correct = torch.tensor([math.nan if found is None else float(found) for found in verdicts])
    staleness = {}
    if batch.versions is not None and batch.version is not None:
        staleness = staleness_metrics(
            batch.versions.values,
            batch.version,
            config.algorithm.correction.max_staleness,
            lengths=batch.versions.lengths,
        )
    measured = rollout_metrics(
        EstimatorInputs(cu_seqlens=batch.cu_seqlens, **fields_of(EstimatorInputs, batch)),
        finish_reasons=[sample.finish_reason for sample in samples],
        responses=[sample.response_text for sample in samples],
        prompt_overlap=prompt_overlap(
            batch.tokens, batch.cu_tokens, batch.loss_mask, vectors["group_ids"]
        ),
        entropy=vectors.get("entropy"),
        correct=correct,
        returns=vectors.get("returns"),
        reward_coef=config.algorithm.kl.reward_coef,
    )
    return (
        conversation_metrics([s.measured for s in samples]) | measured | staleness | batch.metrics
    )


@dataclass(frozen=True)
class Utilization:
    """Counts the policy's arithmetic in a step. Recomputation is overhead and does not count."""

    shape: ModelShape
    peak: float  # FLOP/s of all trainer GPUs together
    scores_policy: bool  # a step begins with a pass of the policy over the whole batch
    trains_adapters: bool = False  # a backward pass makes no gradients of weights

    def flops(
        self,
        batch: RolloutBatch,
        minibatches: Sequence[Sequence[int]],
        updates: Sequence[UpdateResult],
        plans: Sequence[MinibatchPlan] | None = None,
    ) -> float:
        """Count model FLOPs: a scoring pass, and forward and backward of each policy update.

        A backward pass costs twice a forward pass, or as much where adapters are trained.

        Args:
            minibatches: the sequences of each optimizer step; `updates` cycled through them in
                order.
            plans: the plan of each optimizer step; if given, a prefix shared by sequences of a
                micro-batch counts once.
        """
        lengths = batch.lengths.tolist()
        trainable = batch.num_trainable_each

        sizes = [
            ([lengths[i] for i in chosen], sum(trainable[i] for i in chosen))
            for chosen in minibatches
        ]
        once = [self.shape.forward_flops(*size) for size in sizes]
        if plans is not None:
            once = [flops - self.shape.layer_flops(plan.shared) for flops, plan in zip(once, plans)]
        scored = sum(once) if self.scores_policy else 0.0
        sweeps = 2.0 if self.trains_adapters else 3.0
        both = [
            sweeps * flops + self.shape.prediction_flops(*size) for flops, size in zip(once, sizes)
        ]
        return scored + sum(
            both[k % len(both)] for k, done in enumerate(updates) if "lr" in done.metrics
        )
