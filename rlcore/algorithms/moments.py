"""Streaming statistics of per-token and per-sequence vectors, which merge by addition.

A micro-batch, a data-parallel rank and a whole step differ in nothing but how often `merge` was
called, so no metric depends on the split and none is an average of averages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlcore.algorithms.reductions import REDUCTIONS, Totals, mean
from rlcore.algorithms.types import PolicyLoss


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
        self._sums: dict[str, Tensor] = {}  # [3]: count, sum, sum of squares
        self._maxima: dict[str, Tensor] = {}  # []

    @property
    def names(self) -> list[str]:
        """The names seen so far, sorted; those of empty vectors too, for ranks without tokens."""
        return sorted(self._sums)

    def add(self, name: str, values: Tensor) -> None:
        """Take in a vector of any length, detached."""
        wide = values.detach().double().reshape(-1)
        count = wide.new_tensor(float(wide.numel()))
        sums = torch.stack([count, wide.sum(), wide.square().sum()])
        maximum = wide.max() if wide.numel() else wide.new_tensor(float("-inf"))
        self._take(name, sums, maximum)

    def update(self, vectors: Mapping[str, Tensor]) -> None:
        """Take in several vectors by name."""
        for name, values in vectors.items():
            self.add(name, values)

    def add_objective(self, loss: PolicyLoss, weights: Tensor) -> None:
        """Take in the metrics of what is minimised, and its weighted terms as `objective_loss`."""
        self.update(loss.metrics)
        self.add("objective_loss", weights * loss.per_token.detach())

    def add_value_loss(
        self, per_token: Tensor, weights: Tensor, clipped: Tensor | None = None
    ) -> None:
        """Add the weighted terms of the critic's loss, and where its clip acted."""
        self.add("value_loss", weights * per_token.detach())
        if clipped is not None:
            self.add("value_clipfrac", clipped)

    def merge(self, other: Moments) -> None:
        """Take in all of another accumulator."""
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
        """Return the metrics by their published names, without those that were fed no token.

        `REDUCTIONS` says what is published of which name. One that is not there becomes its mean,
        as `policy/<name>_avg`, or under its own name if that contains a slash.
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
