"""The metrics that are published of the totals of a vector, each with its definition.

A statistic sees totals alone, which add up over micro-batches and ranks; so every metric here is
the same however the step was split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricSpec:
    """One metric: name, meaning, what it is averaged over ("-": nothing), and unit.

    A name with `<...>` in it stands for a family.
    """

    name: str
    definition: str
    denominator: str
    unit: str


@dataclass(frozen=True)
class Totals:
    """The sums that `Moments` keeps of all vectors under one name; `count` > 0."""

    count: float
    total: float
    squares: float
    maximum: float
    optimizer_steps: int


Statistic = Callable[[Totals], float | None]  # None: not defined for so few values


def mean(x: Totals) -> float:
    """Sum / count."""
    return x.total / x.count


def maximum(x: Totals) -> float:
    """Return the largest value."""
    return x.maximum


def variance(x: Totals) -> float | None:
    """Return the unbiased variance; None for a single value."""
    return (
        max(x.squares - x.total * x.total / x.count, 0.0) / (x.count - 1) if x.count > 1 else None
    )


def effective_share(x: Totals) -> float:
    """Return effective sample size / count: (sum w)^2 / (count * sum w^2); 0 where all are 0."""
    return x.total * x.total / (x.count * x.squares) if x.squares != 0 else 0.0


def per_step(x: Totals) -> float:
    """Sum / optimizer steps: what was fed are the weighted terms of a loss, which add up to it."""
    return x.total / x.optimizer_steps


_ROWS: tuple[tuple[str, Statistic, str, str, str, str], ...] = (
    # vector, statistic, and the metric: name, definition, denominator, unit
    # - what is minimised
    ("objective_loss", per_step, "objective/loss", "what the optimizer minimised: policy, KL and "
     "entropy terms", "optimizer steps", "1"),
    ("policy_loss", per_step, "loss/policy_avg", "sum of loss weight * policy loss over tokens, "
     "correction included", "optimizer steps", "1"),
    ("value_loss", per_step, "loss/value_avg", "sum of loss weight * value loss over tokens",
     "optimizer steps", "1"),
    # - the policy, and the policy against the one before the step
    ("approxkl", mean, "policy/approxkl_avg", "half the squared log-ratio of the policy to the one "
     "before the step", "tokens", "nats"),
    ("clipfrac", mean, "policy/clipfrac_avg", "1 where the clip changes the policy loss", "tokens",
     "share"),
    ("clipfrac_high", mean, "policy/clipfrac_high_avg", "1 where the upper limit does", "tokens",
     "share"),
    ("clipfrac_low", mean, "policy/clipfrac_low_avg", "1 where the lower limit does", "tokens",
     "share"),
    ("dual_clipfrac", mean, "policy/dual_clipfrac_avg", "1 where dual clip caps the policy loss",
     "tokens", "share"),
    ("entropy", mean, "policy/entropy_avg", "entropy of the policy", "tokens", "nats"),
    ("ratio", mean, "val/ratio", "probability ratio of the policy to the one before the step",
     "tokens", "1"),
    ("ratio", variance, "val/ratio_var", "variance of that ratio", "tokens - 1", "1"),
    ("ratio", maximum, "val/ratio_max", "largest such ratio", "-", "1"),
    ("value_clipfrac", mean, "val/clipfrac_avg", "1 where the clip raises the value loss", "tokens",
     "share"),
    # - the policy against the reference
    ("rollout/kl", mean, "rollout/kl", "raw KL estimate (algorithm.kl.reward_kind) against the "
     "reference", "tokens", "nats"),
    ("rollout/kl_clamped_share", mean, "rollout/kl_clamped_share", "1 where the log-ratio to the "
     "reference is beyond +-20", "tokens", "share"),
    # - the trainer against the engine: `mismatch_vectors`
    ("engine_gap", mean, "rollout/train_rollout_logprob_diff",
     "absolute difference of the trainer's and the engine's log-prob", "tokens", "nats"),
    ("engine_gap", maximum, "rollout/train_rollout_logprob_diff_max", "largest such difference",
     "-", "nats"),
    ("engine_kl", mean, "rollout/train_rollout_logprob_diff_kl", "k3 estimate of KL(engine, "
     "trainer)", "tokens", "nats"),
    ("engine_ratio", effective_share, "rollout/ess",
     "effective sample size of w = trainer / engine probability: (sum w)^2 / (M * sum w^2)",
     "tokens", "share"),
    # - what is done about that: `Correction`
    ("correction_weight", mean, "correction/weight_avg", "weight of the policy loss, 0 where it is "
     "masked", "tokens", "1"),
    ("correction_weight", effective_share, "correction/ess",
     "effective sample size of those weights: (sum w)^2 / (M * sum w^2)", "tokens", "share"),
    ("correction_clipped", mean, "correction/clipped_fraction", "1 where tis moved the weight to a "
     "bound", "tokens", "share"),
    ("correction_masked", mean, "correction/masked_fraction",
     "1 where the policy loss is masked: outside the bounds (mis, icepop), or in a rejected "
     "sequence",
     "tokens", "share"),
    ("correction_vetoed", mean, "correction/vetoed_fraction",
     "1 where the whole sequence is rejected: by veto, or for an engine's log-prob that is not "
     "finite", "all sequences",
     "share"),
)  # fmt: skip

REDUCTIONS: Mapping[str, tuple[tuple[Statistic, MetricSpec], ...]] = {
    vector: tuple(
        (statistic, MetricSpec(*spec)) for owner, statistic, *spec in _ROWS if owner == vector
    )
    for vector in dict.fromkeys(row[0] for row in _ROWS)
}

STREAMED_METRICS = (
    *(spec for rows in REDUCTIONS.values() for _, spec in rows),
    MetricSpec(
        "policy/<name>_avg",
        "what the policy loss reports as <name>: see its docstring",
        "tokens or sequences",
        "the loss's",
    ),
)
