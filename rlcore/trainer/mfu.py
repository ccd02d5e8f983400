"""`perf/mfu`: the share of the GPUs' peak that the policy's arithmetic made in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlcore.data.batch import RolloutBatch
from rlcore.data.step import UpdateResult
from rlcore.planning.shape import ModelShape


@dataclass(frozen=True)
class Utilization:
    """What the policy computes in a step, nothing counted twice: recomputation is lost time, not
    work.
    """

    shape: ModelShape
    peak: float  # FLOP/s of all GPUs of the trainer together
    scores_policy: bool  # a step begins with a pass of the policy over the whole batch

    def flops(
        self,
        batch: RolloutBatch,
        minibatches: Sequence[Sequence[int]],
        updates: Sequence[UpdateResult],
    ) -> float:
        """Model FLOPs: a scoring pass, and forward and backward (three times as much) of each
        update that trained the policy.

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
        """`flops` by what the GPUs' peak allows in `seconds`."""
        return self.flops(batch, minibatches, updates) / (seconds * self.peak)
