"""Model FLOPs utilisation (`perf/mfu`): the share of the GPUs' peak that a step used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlcore.data.batch import RolloutBatch
from rlcore.data.step import UpdateResult
from rlcore.planning.shape import ModelShape


@dataclass(frozen=True)
class Utilization:
    """Counts the policy's arithmetic in a step. Recomputation does not count: it is lost time."""

    shape: ModelShape
    peak: float  # FLOP/s of all GPUs of the trainer together
    scores_policy: bool  # a step begins with a pass of the policy over the whole batch

    def flops(
        self,
        batch: RolloutBatch,
        minibatches: Sequence[Sequence[int]],
        updates: Sequence[UpdateResult],
    ) -> float:
        """Count model FLOPs: a scoring pass, and forward and backward of each policy update.

        A backward pass costs twice a forward pass.

        Args:
            minibatches: the sequences of each optimizer step; `updates` went through them in order,
                again and again.
        """
        lengths = batch.lengths.tolist()
        trainable = batch.num_trainable_each

        def forward(rows: Iterable[int]) -> float:
            chosen = list(rows)
            return self.shape.forward_flops(
                (lengths[i] for i in chosen), sum(trainable[i] for i in chosen)
            )

        scored = forward(range(batch.num_sequences)) if self.scores_policy else 0.0
        trained = (
            forward(minibatches[k % len(minibatches)])
            for k, done in enumerate(updates)
            if "lr" in done.metrics
        )
        return scored + 3.0 * sum(trained)

    def mfu(
        self,
        batch: RolloutBatch,
        minibatches: Sequence[Sequence[int]],
        updates: Sequence[UpdateResult],
        *,
        seconds: float,
    ) -> float:
        """Divide `flops` by what the GPUs could do at their peak in `seconds`."""
        return self.flops(batch, minibatches, updates) / (seconds * self.peak)
