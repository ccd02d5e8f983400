"""Streaming statistics of per-token and per-sequence vectors, and the metrics made from them.

A micro-batch, a data-parallel rank and a whole step differ only in the number of `merge` calls, so
no metric depends on the split and none is an average of averages: a statistic reads only totals,
which add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlcore.algorithms.types import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


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


# A statistic returns None where it is undefined, as the variance of a single value is.
Statistic = Callable[[Totals], float | None]


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
    """Sum / optimizer steps, for the weighted terms of a loss, which add up to the loss."""
    return x.total / x.optimizer_steps


_ROWS: tuple[tuple[str, Statistic, str, str, str, str], ...] = (
    # Each row: vector, statistic, and the metric's name, definition, denominator and unit.
    # - the objective
    ("objective_loss", per_step, "objective/loss", "what the optimizer minimised: policy, KL and "
     "entropy terms", "optimizer steps", "1"),
    ("policy_loss", per_step, "loss/policy_avg", "sum of loss weight * policy loss over tokens, "
     "correction included", "optimizer steps", "1"),
    ("mtp_loss", mean, "loss/mtp_avg", "cross-entropy of the layer for multi-token prediction "
     "(policy.mtp_coef)", "trained tokens behind two others", "nats"),
    ("value_loss", per_step, "loss/value_avg", "sum of loss weight * value loss over tokens",
     "optimizer steps", "1"),
    # - the policy, and the policy against the one before the step
    ("approxkl", mean, "policy/approxkl_avg", "half the squared log-ratio of the policy to the one "
     "before the step; with algorithm.old_logprobs: rollout, to the engine's, of older weights too",
     "tokens", "nats"),
    ("step_kl", mean, "policy/step_kl", "half the squared log-ratio of the policy after the step, "
     "of one optimizer step or more, to the one before it; 0 where none was taken",
     "some tokens of each replica", "nats"),
    ("clipfrac", mean, "policy/clipfrac_avg", "1 where the clip changes the policy loss", "tokens",
     "share"),
    ("clipfrac_high", mean, "policy/clipfrac_high_avg", "1 where the upper limit does", "tokens",
     "share"),
    ("clipfrac_low", mean, "policy/clipfrac_low_avg", "1 where the lower limit does", "tokens",
     "share"),
    ("dual_clipfrac", mean, "policy/dual_clipfrac_avg", "1 where dual clip caps the policy loss",
     "tokens", "share"),
    ("entropy", mean, "policy/entropy_avg", "entropy of the policy", "tokens", "nats"),
    ("ratio", mean, "val/ratio", "probability ratio of the policy to the one before the step; with "
     "algorithm.old_logprobs: rollout, to the engine's, of older weights too", "tokens", "1"),
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
    # - the correction of that difference: `Correction`
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


class Moments:
    """Count, sum, sum of squares and maximum of each name, float64, on the vectors' device.

    Nothing here waits for the device before `reduce`.

    Example:
        moments = Moments()
        for inputs, weights in micro_batches:
            loss = policy_loss(inputs)
            moments.add_objective(loss, weights)
        sums, maxima = moments.pack(moments.names)      # all-reduce with SUM and with MAX
        metrics = Moments.unpack(moments.names, sums, maxima).reduce(optimizer_steps=4)
    """

    def __init__(self) -> None:
        # Vectors [3] of count, sum and sum of squares, and scalars.
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The names seen so far, sorted; those of empty vectors too, for ranks without tokens."""
        return sorted(self._sums)

    def add(self, name: str, values: Tensor) -> None:
        """Add a vector of any length, detached."""
        wide = values.detach().double().reshape(-1)
        count = wide.new_tensor(float(wide.numel()))
        sums = torch.stack([count, wide.sum(), wide.square().sum()])
        maximum = wide.max() if wide.numel() else wide.new_tensor(float("-inf"))
        self._take(name, sums, maximum)

    def update(self, vectors: Mapping[str, Tensor]) -> None:
        """Add several vectors by name."""
        for name, values in vectors.items():
            self.add(name, values)

    def add_objective(self, loss: PolicyLoss, weights: Tensor) -> None:
        """Add the metrics of the objective, and its weighted terms as `objective_loss`."""
        self.update(loss.metrics)
        self.add("objective_loss", weights * loss.per_token.detach())

    def add_value_loss(self, per_token: Tensor, weights: Tensor, clipped: Tensor | None) -> None:
        """Add the weighted terms of the critic's loss, and where its clip acted."""
        self.add("value_loss", weights * per_token.detach())
        if clipped is not None:
            self.add("value_clipfrac", clipped)

    def merge(self, other: Moments) -> None:
        """Add everything of another accumulator."""
        for name in other.names:
            self._take(name, other._sums[name], other._maxima[name])

    def pack(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Lay out `names` for an all-reduce: float64 `[N, 3]` to sum and `[N]` to maximise.

        A name that was never seen is neutral. All ranks must pass the same names in the same order.
        """
        device = next(iter(self._sums.values())).device if self._sums else torch.device("cpu")
        nothing = torch.zeros(3, dtype=torch.float64, device=device)
        lowest = torch.full((), float("-inf"), dtype=torch.float64, device=device)
        if not names:
            return nothing.new_zeros(0, 3), nothing.new_zeros(0)
        sums = torch.stack([self._sums.get(name, nothing) for name in names])
        return sums, torch.stack([self._maxima.get(name, lowest) for name in names])

    @classmethod
    def unpack(cls, names: Sequence[str], sums: Tensor, maxima: Tensor) -> Moments:
        """Undo `pack`."""
        moments = cls()
        for name, three, maximum in zip(names, sums, maxima):
            moments._take(name, three, maximum)
        return moments

    def reduce(self, *, optimizer_steps: int = 1) -> dict[str, float]:
        """Return the metrics by their published names, except those of empty vectors.

        `REDUCTIONS` lists the metrics of each name. Other names are published as a mean, as
        `policy/<name>_avg`, or under their own name if that contains a slash.
        """
        if optimizer_steps < 1:
            raise ValueError(f"optimizer_steps: expected a number >= 1, got {optimizer_steps}")
        sums, maxima = (packed.tolist() for packed in self.pack(self.names))
        metrics: dict[str, float] = {}
        for name, (count, total, squares), maximum in zip(self.names, sums, maxima):
            if count == 0:
                continue
            totals = Totals(count, total, squares, maximum, optimizer_steps)
            if name not in REDUCTIONS:
                metrics[name if "/" in name else f"policy/{name}_avg"] = mean(totals)
                continue
            for statistic, spec in REDUCTIONS[name]:
                value = statistic(totals)
                if value is not None:
                    metrics[spec.name] = value
        return metrics

    def _take(self, name: str, sums: Tensor, maximum: Tensor) -> None:
        if name not in self._sums:
            self._sums[name] = sums
            self._maxima[name] = maximum
            return
        self._sums[name] = self._sums[name] + sums
        self._maxima[name] = torch.maximum(self._maxima[name], maximum)
